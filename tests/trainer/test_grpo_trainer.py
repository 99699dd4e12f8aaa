"""GRPOTrainer: groups of completions, what they are judged by, what is trained, logged, evaluated and resumed."""

import os
from dataclasses import replace

import pandas as pd
import pytest
import torch
from datasets import Dataset

from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from tests.trainer.grpo_runs import even_tokens, logs, make, prompts, run
from trl.models.scoring.head import ScoreOptions
from trl.objectives.group_advantages import estimated
from trl.rollouts.experience import ADVANTAGE, OLD, REF, REWARD, SAMPLING_LOGPS, SCORES, TRAINED
from trl.rollouts.maker import Completed, split_begun
from trl.rollouts.schedule import stream_of
from trl.trainer.loaders import on_device


def window(trainer, number=0):
    return trainer.make_rollout_batch(number)


def test_the_old_and_the_reference_log_probs_are_those_of_the_policy_itself():
    trainer, _ = make(num_iterations=2)
    found = window(trainer).per_token
    assert found[OLD] is found[SAMPLING_LOGPS]  # nobody asked again
    torch.testing.assert_close(found[REF], found[OLD], rtol=0, atol=1e-10)
    advantages = window(trainer).per_row[ADVANTAGE].view(-1, 4)
    torch.testing.assert_close(advantages.sum(dim=1), torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-9)


class Revised:
    """Drafts, then completions of prompt and draft; the draft is handed to reward functions."""

    exact = True
    adds = ("draft",)

    def __call__(self, maker, rows, *, streams):
        drafts = maker.complete(rows["input_ids"], streams=streams).completions.split()
        prompts = [[*ids, *draft.tolist()] for ids, draft in zip(rows["input_ids"], drafts, strict=True)]
        again = maker.complete(prompts, streams=[stream_of(stream, (1,), 0) for stream in streams])
        return Completed(again, {"draft": [draft.tolist() for draft in drafts]})


class Half(Revised):
    def __call__(self, maker, rows, *, streams):
        half = len(streams) // 2
        return super().__call__(maker, {"input_ids": rows["input_ids"][:half]}, streams=streams[:half])


def add(first: int, second: int) -> int:
    """The sum.

    Args:
        first: a number.
        second: another.
    """
    return first + second


def longer_than_draft(completion_ids, draft, **_):
    return [float(len(ids) - len(other)) for ids, other in zip(completion_ids, draft, strict=True)]


@pytest.mark.parametrize("method", ["grpo", "rloo", "minillm"])
def test_a_completer_of_ones_own(method, tmp_path):
    given, more = {"completer": Revised()}, {"teacher": "gpt2"} if method == "minillm" else {}
    settings = {"reward_funcs": longer_than_draft, "save_strategy": "steps", "save_steps": 2, **more}
    whole, _ = run(method, given=dict(given), folder=str(tmp_path), **settings)
    resumed, _ = make(method, given=dict(given), folder=str(tmp_path), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(map(torch.equal, whole.model.parameters(), resumed.model.parameters()))
    first = window(make(method, given=dict(given), **settings)[0])
    assert (first.prompts.lengths > 3).all()


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"completer": print}, TypeError, "completer must have an attribute exact"),
        ({"completer": Revised(), "rollout_func": lambda p, t: {}}, ValueError, "rollout_func and completer cannot be"),
        ({"completer": Revised(), "tools": [add]}, ValueError, "cannot be combined with a rollout_func or completer"),
        ({"completer": Half()}, ValueError, "completer must return Completed with one completion per row, got 4"),
    ],
)
def test_bad_completers_are_refused(given, error, words):
    with pytest.raises(error, match=words):
        run(given=given)


def above_median(rewards, group_size):
    return rewards - rewards.view(-1, group_size).median(dim=1).values.repeat_interleave(group_size)


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_a_trainer_takes_an_advantage_estimator(method, tmp_path):
    for estimator in ("leave_one_out", above_median):
        trainer, _ = make(method, advantage_estimator=estimator)
        rows = window(trainer).per_row
        torch.testing.assert_close(rows[ADVANTAGE], estimated(estimator, rows[REWARD], 4), rtol=0, atol=1e-12)
    settings = {"advantage_estimator": above_median, "save_strategy": "steps", "save_steps": 2, "folder": str(tmp_path)}
    whole, _ = run(method, **settings)
    resumed, _ = make(method, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for own, again in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(own, again)
    other, _ = run(method)
    assert not all(map(torch.equal, whole.model.parameters(), other.model.parameters()))


def test_a_cut_distribution_is_scored_again_and_corrected():
    trainer, _ = run(num_iterations=2, top_k=20, max_steps=2)
    found = window(trainer, 1).per_token
    whole = found[SAMPLING_LOGPS] + found["sampling_kept"]
    torch.testing.assert_close(found[OLD], whole, rtol=0, atol=1e-9)
    torch.testing.assert_close(found["correction"], torch.ones_like(found[OLD]), rtol=0, atol=1e-8)
    assert logs(trainer)[0]["sampling/importance_sampling_ratio/max"] == pytest.approx(1, abs=1e-8)


@pytest.mark.parametrize("kwargs", [{"typical_p": 0.5, "no_repeat_ngram_size": 2}, {"sequence_bias": [[[20], 3.0]]}])
def test_old_log_probs_of_processed_distributions_are_the_policys_own(kwargs):
    """Cuts need no correction, as those of top_k; what changes the odds of the tokens that are left does."""
    trainer, _ = run(num_iterations=2, generation_kwargs=kwargs, max_steps=2)
    found = make(num_iterations=2, generation_kwargs=kwargs)[0]
    experience = window(found)
    batch = on_device(found, found.batch_of(experience))
    with torch.no_grad():
        own = found.scorer.score(found.model, batch, ScoreOptions()).logps
    torch.testing.assert_close(experience.per_token[OLD], own, rtol=0, atol=1e-10)
    assert (experience.per_token[SAMPLING_LOGPS] - own).abs().max() > 0.05
    largest = logs(trainer)[0]["sampling/importance_sampling_ratio/max"]
    assert (largest == pytest.approx(1, abs=1e-8)) == ("typical_p" in kwargs)


def test_weights_of_whole_sequences_are_taken_to_the_sampler_itself():
    """VESPO: no capped factor beside the kernel; the log still says how far the sampler is."""
    trainer, _ = run(loss_type="vespo", num_iterations=2, top_k=20, max_steps=2)
    rows = window(trainer, 1)
    found = rows.per_token
    assert "correction" not in found
    assert torch.equal(found[OLD], found[SAMPLING_LOGPS] + found["sampling_kept"])
    for is_first in (True, False):
        step = replace(trainer.scoring().step, is_first=is_first)
        assert torch.equal(trainer.method.old_logps(rows, step), found[OLD])
    entries = logs(trainer)
    assert entries[0]["sampling/importance_sampling_ratio/max"] == pytest.approx(1, abs=1e-8)
    assert entries[0]["vespo/phi_seq_mean"] == pytest.approx(1, abs=1e-6)
    assert entries[1]["vespo/phi_seq_mean"] != pytest.approx(1, abs=1e-3)


def test_sources_without_an_opinion():
    def first_row_only(completions, **_):
        return [1.0, *[None] * (len(completions) - 1)]

    trainer, _ = run(reward_funcs=first_row_only, max_steps=1)
    first = logs(trainer)[0]
    assert first["reward"] == 1.0 and "rewards/first_row_only/std" not in first
    assert first["grad_norm"] == 0.0
    experience = window(trainer)
    own = experience.per_token[TRAINED]
    assert torch.equal(own, experience.completions.row_index == 0)
    assert experience.per_row[SCORES].isnan().sum() == 7 and not experience.per_row[ADVANTAGE].any()


def test_truncated_completions_are_not_trained():
    trainer, _ = make(mask_truncated_completions=True, max_completion_length=3)
    experience = window(trainer, 1)
    stopped = experience.per_row["stopped"].bool()
    assert 0 < stopped.sum() < len(stopped)
    assert torch.equal(experience.per_token[TRAINED], stopped[experience.completions.row_index])
    trainer, _ = run(mask_truncated_completions=True, max_completion_length=1, max_steps=2, loss_type="bnpo")
    cut = [entry for entry in logs(trainer) if entry["completions/clipped_ratio"] == 1]
    assert cut and all(e["grad_norm"] == 0 and "completions/mean_terminated_length" not in e for e in cut)


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_completions_are_learned_from_as_often_as_asked(method):
    trainer, _ = run(method, num_iterations=2, learning_rate=1e-3)
    entries = logs(trainer)
    tokens = [entry["num_tokens"] for entry in entries]
    assert tokens[0] == tokens[1] < tokens[2] == tokens[3]
    assert "reward" in entries[0] and "reward" not in entries[1]
    assert entries[0]["clip_ratio/region_mean"] == 0
    assert entries[-1]["epoch"] == pytest.approx(4 / 14)  # seven windows of two prompts, twice


def test_messages_are_answered_with_messages():
    words = tiny_tokenizer()
    words.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}{{ mark }}{% endif %}"
    )
    seen = []

    def look(prompts, completions, tag, trainer_state, **_):
        seen.append((prompts, completions, tag, trainer_state.global_step))
        return [float(len(c[0]["content"])) for c in completions]

    rows = [{"prompt": [{"role": "user", "content": text}], "tag": number} for number, text in enumerate("abcd")]
    trainer, _ = run(
        reward_funcs=look,
        data=Dataset.from_list(rows),
        given={"processing_class": words, "model": tiny_model("llama")},
        chat_template_kwargs={"mark": "xyz"},
        max_steps=1,
    )
    shown, completions, tags, step = seen[0]
    assert shown[0][0]["role"] == "user" and completions[0][0]["role"] == "assistant"
    assert len(tags) == 8 and len(set(tags)) == 2 and step == 0
    assert words.decode(trainer.train_dataset[0]["input_ids"]).endswith("xyz")


def test_what_a_prompt_begins_to_say_is_part_of_the_completion():
    seen = {}

    def look(prompts, completions, **_):
        seen.update(prompts=prompts, completions=completions)
        return [float(len(c[0]["content"])) for c in completions]

    begun = {"role": "assistant", "content": "<think>"}
    trainer, _ = make(
        reward_funcs=look,
        data=Dataset.from_list([{"prompt": [{"role": "user", "content": text}, begun]} for text in "ab"]),
        given={"processing_class": tiny_tokenizer("chatml"), "model": tiny_model("llama", vocab_size=400)},
    )
    found = window(trainer)
    assert trainer.processing_class.decode(found.prompts.split()[0]).endswith("assistant\n<think>")
    texts = trainer.processing_class.batch_decode(found.completions.split(), skip_special_tokens=True)
    assert [each[0]["content"] for each in seen["completions"]] == [f"<think>{text}" for text in texts]
    assert all([message["role"] for message in prompt] == ["user"] for prompt in seen["prompts"])
    parts = {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert split_begun([parts]) == ([], "ab")


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_an_evaluation_does_not_depend_on_its_batches(method):
    found = []
    for size in (2, 8):
        sampled = {"num_generations_eval": 2, "repetition_penalty": 1.2}
        trainer, _ = make(method, per_device_eval_batch_size=size, **sampled)
        found.append(trainer.evaluate(prompts(6)))
    names = [
        n
        for n in found[0]
        if not any(w in n for w in ("time", "second", "std", "low_min", "high_max"))  # of a batch each
    ]
    assert found[0]["eval_completions/min_length"] == int(found[0]["eval_completions/min_length"]) < 7
    assert {
        "eval_completions/max_terminated_length",
        "eval_loss",
        "eval_reward",
        "eval_kl",
        "eval_entropy",
        "eval_completions/mean_length",
    } <= set(names)
    for name in names:
        assert found[0][name] == pytest.approx(found[1][name], abs=1e-9), name


def test_completions_are_written_and_shown(tmp_path, capsys):
    run(folder=str(tmp_path), log_completions=True, num_completions_to_print=2, max_steps=2, logging_steps=2)
    table = pd.read_parquet(tmp_path / "completions" / "completions_00002.parquet")
    named = ["step", "prompt", "completion", "even_tokens", "advantage", "reward"]
    assert list(table.columns)[: len(named)] == named and len(table) == 8
    assert "Step 2" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_a_function_may_generate(method):
    def rollout(prompts, trainer):
        count = len(prompts)
        ends = trainer.sampling.stop_token_ids[-1]
        ids = [[4, 5, ends] if row % 2 else [6, 7, 8] for row in range(count)]
        return {
            "prompt_ids": [[3, 9]] * count, "completion_ids": ids, "logprobs": [[-4.0] * 3] * count, "fit": list(range(count)),
        }  # fmt: skip

    def fit_for(fit, **_):
        return [float(value) for value in fit]

    trainer, _ = run(method, reward_funcs=fit_for, given={"rollout_func": rollout}, max_steps=1)
    first = logs(trainer)[0]
    assert first["reward"] == pytest.approx(3.5, abs=1e-9) and first["completions/clipped_ratio"] == 0.5
    assert ("sampling/sampling_logp_difference/mean" in first) == (method == "grpo")


def rollouts(**changes):
    def rollout(prompts, trainer):
        count = len(prompts)
        return {"prompt_ids": [[3]] * count, "completion_ids": [[4, 5]] * count, **changes}

    return {"rollout_func": rollout}


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (rollouts(completion_ids=[[4]]), ValueError, "8 completion_ids"),
        (rollouts(completion_ids=[[]] * 8), ValueError, "completion_ids of row 0"),
        (rollouts(logprobs=[[-1.0]] * 8), ValueError, "1 logprobs for 2 tokens"),
        ({"rollout_func": lambda prompts, trainer: [1]}, TypeError, "got list"),
    ],
)
def test_bad_rollouts_are_named(given, error, words):
    with pytest.raises(error, match=words):
        run(given=given)


def test_a_reward_that_changes_the_working_directory_moves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    def wandering(completion_ids, **kwargs):
        os.chdir(tmp_path / "elsewhere")
        return even_tokens(completion_ids)

    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "log_completions": True}
    trainer, _ = make(reward_funcs=wandering, folder="out", **settings)
    trainer.train()
    assert not list((tmp_path / "elsewhere").iterdir())
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"checkpoint-1", "checkpoint-2", "completions", "README.md"} <= names
