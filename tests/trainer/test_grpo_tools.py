"""GRPO and RLOO with tools: what is trained, judged, logged, evaluated and resumed, and what is refused."""

import json

import pytest
import torch
from datasets import Dataset

from tests.agents.tool_words import TEMPLATE, TOOLS, call_tokenizer
from tests.tiny_tokenizers import CHATML
from tests.trainer.grpo_runs import logs
from tests.trainer.grpo_tool_runs import conversations, make, run
from tests.trainer.one_step import assert_same_steps
from tests.two_processes import launch
from trl.agents.tool_loop import CALLS
from trl.models.scoring.head import ScoreOptions
from trl.rollouts.experience import OLD, REF, SAMPLING_LOGPS, STOPPED, TOOL_OUTPUT, TRAINED


def window(trainer, number=0):
    return trainer.make_rollout_batch(number)


@pytest.mark.parametrize("method", ["grpo", "rloo", "online_dpo"])
def test_what_tools_answer_is_never_trained_on(method):
    """The gradient of the loss with respect to the log-probs is 0 at every tool token, and not at the others."""
    own = {"num_generations": 2, "tie_policy": "both"} if method == "online_dpo" else {}
    trainer, _ = make(method, num_iterations=2, per_device_train_batch_size=16, **own)
    experience = window(trainer)
    from_tool = experience.per_token[TOOL_OUTPUT]
    assert 10 < from_tool.sum() < len(from_tool) / 2
    assert torch.equal(experience.per_token[TRAINED], ~from_tool)
    batch = trainer.micro_batch(experience)
    batch.pop("experience")
    scored = trainer.scoring().logps(batch, ScoreOptions(entropy="scored"))
    logps = scored.logps.detach().requires_grad_()
    (terms,) = trainer.objective(experience, scored._replace(logps=logps))
    (gradient,) = torch.autograd.grad((terms.values * terms.weights).sum(), logps)
    assert not gradient[from_tool].any() and (gradient[~from_tool] != 0).float().mean() > 0.9
    assert not (terms.weights if terms.per == "token" else torch.zeros(1)).expand(1, -1).isnan().any()
    # Neither KL nor entropy nor ratio sees what is written there.
    wild = torch.where(from_tool, -1e4, 0.0).double()
    (other,) = trainer.objective(
        experience.with_tokens(**{REF: experience.per_token[REF] + wild, OLD: experience.per_token[OLD] + wild}),
        scored._replace(logps=logps, entropies=scored.entropies - wild),
    )
    torch.testing.assert_close(other.values * other.weights, terms.values * terms.weights, rtol=0, atol=0)
    for name, value in terms.metrics.items():
        assert other.metrics[name] == value, name


def test_log_probs_of_the_sampler_stand_for_the_policys_after_several_turns():
    trainer, _ = make(num_iterations=2, dtype="float32")
    assert trainer.sampler_is_exact
    experience = window(trainer)
    found = experience.per_token
    assert found[OLD] is found[SAMPLING_LOGPS] and not found[OLD][found[TOOL_OUTPUT]].any()
    assert (experience.per_row[CALLS] > 1).any()
    sampled = ~found[TOOL_OUTPUT]
    torch.testing.assert_close(
        found[OLD][sampled], found[REF][sampled], rtol=0, atol=1e-5
    )  # the reference is the policy still


OF_ROWS = Dataset.from_list([{**row, "chat_template_kwargs": {"hint": "hi", "other": None}} for row in conversations()])


@pytest.mark.parametrize("settings", [{"chat_template_kwargs": {"hint": "hi"}}, {"data": OF_ROWS}])
def test_reward_functions_see_every_message(settings):
    seen = []

    def look(prompts, completions, completion_ids, **_):
        seen.append((prompts, completions, completion_ids))
        return [0.0] * len(completions)

    trainer, _ = make(reward_funcs=look, **settings)
    experience = window(trainer)
    words = trainer.processing_class
    prompts, completions, ids = seen[0]
    assert words.decode(trainer.train_dataset[0]["input_ids"]).startswith("<tools> add echo fail <user>")
    assert ids == [row.tolist() for row in experience.completions.split()]
    roles = [[message["role"] for message in each] for each in completions]
    assert any("tool" in row for row in roles) and all(row[0] == "assistant" for row in roles)
    answered = next(each for each in completions if any(m["role"] == "tool" for m in each))
    first = next(n for n, message in enumerate(answered) if message["role"] == "tool")
    assert answered[first - 1]["tool_calls"][0]["function"]["name"] == answered[first]["name"]
    text = words.decode(ids[completions.index(answered)])
    assert "<tool>" in text and "<assistant> hi" in text  # the template's own argument, behind an answer too
    assert prompts[0][0]["role"] == "user"


WHOLE = {"per_device_train_batch_size": 16, "num_iterations": 2, "max_steps": 2}
SPLIT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}
METHODS = {
    "dapo": ("grpo", {}),
    "grpo, low entropies out": ("grpo", {"loss_type": "grpo", "top_entropy_quantile": 0.6}),
    "cispo, corrected": ("grpo", {"loss_type": "cispo", "epsilon_high": 1.2, "top_k": 12}),
    "gspo": ("grpo", {"loss_type": "bnpo", "importance_sampling_level": "sequence"}),
    "rloo": ("rloo", {"learning_rate": 1e-3}),
}


@pytest.mark.parametrize("name", METHODS)
def test_gradients_do_not_depend_on_how_a_step_is_cut(name):
    method, settings = METHODS[name]
    trainer, expected = run(method, **WHOLE, **settings)
    assert logs(trainer)[-1]["tokens/tool_output"] > 10
    for change in (SPLIT, {"prefix_sharing": False}):
        _, found = run(method, **{**WHOLE, **settings, **change})
        assert_same_steps(found.steps, expected.steps)


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_a_run_that_stops_within_a_window_goes_on_to_the_same_bits(method, tmp_path):
    settings = {
        "steps_per_generation": 2, "num_iterations": 2, "max_steps": 6, "save_strategy": "steps", "save_steps": 3,
        "learning_rate": 0.01, "top_k": 20, "dtype": "float32",
    }  # fmt: skip
    whole, _ = run(method, folder=str(tmp_path / "whole"), **settings)
    again, _ = make(method, folder=str(tmp_path / "again"), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name
    assert logs(again)[-1] == logs(whole)[-1]


@pytest.mark.slow
def test_two_processes(tmp_path):
    settings = {**WHOLE, "per_device_train_batch_size": 8, "max_steps": 3, "learning_rate": 0.01}
    trainer, expected = run(**settings)
    metrics = trainer.evaluate(conversations(3))
    cut = {**settings, "per_device_train_batch_size": 4}
    launch("tests.trainer.grpo_tool_runs", str(tmp_path / "two.pt"), json.dumps(cut))
    found = torch.load(tmp_path / "two.pt")
    assert_same_steps(found["gradients"], expected.steps)
    for own, known in zip(found["logs"], logs(trainer), strict=True):
        for name, value in known.items():
            if name.startswith(("tools/", "tokens/", "reward", "completions/", "num_tokens")):
                assert own[name] == pytest.approx(value, abs=1e-9), name
    for name in ("eval_reward", "eval_tools/call_frequency", "eval_tools/failure_frequency"):
        assert found["eval"][name] == pytest.approx(metrics[name], abs=1e-9), name


def test_what_is_logged():
    settings = {"max_steps": 1, "per_device_train_batch_size": 32, "beta": 0.0}
    (entry,) = logs(run(**settings)[0])
    trainer, _ = make(**settings)
    experience = window(trainer)
    rows, tools = experience.per_row, experience.per_token[TOOL_OUTPUT]
    failed = sum(int(rows[name].sum()) for name in rows if name.startswith("tool_failed_"))
    assert entry["tools/call_frequency"] == pytest.approx(rows[CALLS].double().mean().item())
    assert entry["tools/failure_frequency"] == pytest.approx(failed / int(rows[CALLS].sum()))
    kinds = [entry[f"tools/failures/{kind}"] for kind in ("malformed", "unknown", "arguments", "raised", "deadline")]
    assert sum(kinds) == pytest.approx(entry["tools/failure_frequency"]) and sum(kind > 0 for kind in kinds) > 2
    assert entry["tokens/tool_output"] == tools.sum()
    assert entry["tokens/trained"] + entry.get("tokens/zero_advantage", 0) == (~tools).sum()
    assert entry["completions/mean_length"] == pytest.approx((~tools).sum().item() / 32)  # what the policy said
    assert entry["num_tokens"] == len(tools) + experience.prompts.lengths.sum()
    assert experience.completions.lengths.max() <= 24 and entry["completions/max_length"] <= 24
    assert entry["completions/clipped_ratio"] == pytest.approx(1 - rows[STOPPED].double().mean().item())


def test_an_endless_loop_is_cut_off_and_can_be_masked():
    forever = call_tokenizer()
    settings = {
        "max_tool_calling_iterations": 1,
        "mask_truncated_completions": True,
        "max_completion_length": 60,
    }
    trainer, _ = make(given={"processing_class": forever}, **settings)
    experience = window(trainer)
    limited = experience.per_row["tool_limited"].bool()
    assert limited.any() and not (limited & experience.per_row[STOPPED].bool()).any()
    assert not experience.per_token[TRAINED][limited[experience.completions.row_index]].any()


def test_an_evaluation_calls_tools_and_does_not_depend_on_its_batches():
    found = []
    for size in (2, 8):
        trainer, _ = make(num_generations_eval=2, per_device_eval_batch_size=size)
        found.append(trainer.evaluate(conversations(4)))
    for name in (
        "eval_loss",
        "eval_reward",
        "eval_kl",
        "eval_tools/call_frequency",
        "eval_completions/mean_length",
    ):
        assert found[0][name] == pytest.approx(found[1][name], abs=1e-9), name
    assert found[0]["eval_tools/call_frequency"] > 0


def silent(a: int) -> int:
    return a


TEXTS = Dataset.from_list([{"prompt": "What is one ?"}] * 4)
TOKENS = Dataset.from_list([{"input_ids": [4, 8, 9]}] * 4)
TWICE = Dataset.from_list([{**row, "tools": "[]"} for row in conversations()])


def without_tools():
    words = call_tokenizer()
    words.chat_template = CHATML
    return words


def other_form():
    words = call_tokenizer()
    words.chat_template = TEMPLATE.replace("<tool_call>", "[call]")
    return words


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"given": {"tools": [silent]}}, ValueError, "no docstring"),
        ({"given": {"tools": TOOLS[0]}}, TypeError, "must be a list of functions"),
        ({"given": {"tools": [TOOLS[0], TOOLS[0]]}}, ValueError, "as another tool"),
        ({"given": {"processing_class": without_tools()}}, ValueError, "reads no tools"),
        ({"given": {"processing_class": other_form()}}, ValueError, "cannot be read back"),
        ({"data": TEXTS}, ValueError, "prompts of messages"),
        ({"data": TOKENS}, ValueError, "prompts of messages"),
        ({"data": TWICE}, ValueError, "a column 'tools'"),
        ({"given": {"rollout_func": print}}, ValueError, "with a rollout_func"),
        ({"ds3_gather_for_generation": False}, ValueError, "ds3_gather_for_generation=False"),
        ({"max_tool_calling_iterations": 0}, ValueError, "max_tool_calling_iterations must be a whole number >= 1"),
        ({"tool_deadline": 0.0}, ValueError, "tool_deadline must be > 0"),
    ],
    ids=[
        "no docstring", "no list", "twice", "template", "other form", "text", "tokens", "two sources", "rollout_func", "zero3",
        "iterations", "deadline",
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_the_first_step(settings, error, words):
    with pytest.raises(error, match=words):
        make(**settings)
