"""SDPO: whose completion and which feedback the teacher is shown, what is learned from it, and what is refused."""

from __future__ import annotations

import logging
import tempfile
from typing import Any

import pytest
import torch
from datasets import Dataset

from tests.experimental.test_sdft import initial, row_losses
from tests.tiny_tokenizers import tiny_tokenizer
from tests.trainer.grpo_runs import SETTINGS
from tests.trainer.one_step import KeepGradients
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer
from trl.experimental.sdpo.sdpo_trainer import REPROMPTED, SHOWN_FEEDBACK, SOLVED, teacher_prompt
from trl.objectives.distillation import divergence
from trl.rollouts.experience import SCORES, TEACHER_PROMPTS

TEXTS = ["What colour is the sky?", "How many apples are left?", "Look up.", "Next."]
ROWS = [
    {"prompt": text, "privileged_context": note} for text, note in zip(TEXTS, ["Blue.", " ", "None.", ""], strict=True)
]
ONE = {
    "max_steps": 1, "num_generations": 4, "per_device_train_batch_size": 8, "distillation_mode": "full_logits",
    "teacher_model_kind": "base",
}  # fmt: skip


def even(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """1 for completions that end with an even token."""
    return [float(ids[-1] % 2 == 0) for ids in completion_ids]


def make(config: Any = SDPOConfig, reward: Any = even, rows: Any = None, **settings: Any) -> tuple[Any, KeepGradients]:
    keep, trainer = KeepGradients(), SDPOTrainer if config is SDPOConfig else GRPOTrainer
    given = {**SETTINGS, **(ONE if config is SDPOConfig else {}), "beta": 0.0, **settings}
    args = config(tempfile.mkdtemp(), **given)
    data = Dataset.from_list(ROWS if rows is None else rows)
    return trainer(initial(), reward, args, data, processing_class=tiny_tokenizer("chatml"), callbacks=[keep]), keep


def run(**settings: Any) -> tuple[Any, KeepGradients]:
    trainer, keep = make(**settings)
    trainer.train()
    return trainer, keep


def test_the_teacher_is_shown_the_first_success_of_the_others() -> None:
    trainer, _ = make(
        solution_template="<{successful_previous_attempt}>", reprompt_template="{prompt}|{solution}{feedback}"
    )
    rows, decode = trainer.make_rollout_batch(0), tiny_tokenizer("chatml").decode
    answers = tiny_tokenizer("chatml").batch_decode(
        [row.tolist() for row in rows.completions.split()], skip_special_tokens=True
    )
    kinds = set()
    for row, (shown, prompt) in enumerate(zip(rows.more[TEACHER_PROMPTS].split(), rows.prompts.split(), strict=True)):
        group = range(row - row % 4, row - row % 4 + 4)
        solved = [n for n in group if rows.per_row[SCORES][n] >= 1 and n != row]
        expected = decode(prompt) + (f"|<{answers[solved[0]].strip()}>" if solved else "")
        assert decode(shown) == expected
        assert bool(rows.per_row[SOLVED][row]) == bool(rows.per_row[REPROMPTED][row]) == bool(solved)
        kinds.add((bool(solved), bool(rows.per_row[SCORES][row])))
    assert {(True, False), (True, True)} <= kinds


def test_feedback_is_shown_where_there_is_some() -> None:
    trainer, _ = make(
        include_environment_feedback=True, environment_feedback_only_without_solution=True, num_generations=1,
        per_device_train_batch_size=4, feedback_template=" ({feedback_raw})", reprompt_template="{feedback}{solution}{prompt}",
    )  # fmt: skip
    rows, decode = trainer.make_rollout_batch(0), tiny_tokenizer("chatml").decode
    notes = {row["prompt"]: row["privileged_context"].strip() for row in ROWS}
    for row, (shown, prompt) in enumerate(zip(rows.more[TEACHER_PROMPTS].split(), rows.prompts.split(), strict=True)):
        note = notes[decode(prompt)]
        assert decode(shown) == (f" ({note})" if note else "") + decode(prompt)
        assert bool(rows.per_row[SHOWN_FEEDBACK][row]) == bool(rows.per_row[REPROMPTED][row]) == bool(note)


def test_the_teachers_prompt(tmp_path: Any) -> None:
    args = SDPOConfig(
        str(tmp_path), use_cpu=True, include_environment_feedback=True, remove_thinking_from_demonstration=True, reprompt_template="{prompt}{solution}{feedback}",
        solution_template="+{successful_previous_attempt}", feedback_template="-{feedback_raw}",
    )  # fmt: skip
    assert teacher_prompt(args, "{solution}?", "<think>\nno {prompt}</think>\n4", None) == "{solution}?+4"
    assert teacher_prompt(args, "a", "so be it</think> 4 <think>x</think>5", "b") == "a+4 5-b"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    assert teacher_prompt(args, chat, None, "b") == [chat[0], {"role": "user", "content": "a-b"}]
    assert teacher_prompt(args, chat, None, None) is chat
    assert teacher_prompt(args, [{"from": "human", "value": "a"}], None, "b") == [{"role": "user", "content": "a-b"}]


def test_long_prompts_of_the_teacher_lose_their_beginning() -> None:
    trainer, _ = make(max_reprompt_len=9, use_successful_as_teacher=True)
    rows = trainer.make_rollout_batch(0)
    longest = trainer._sets.context_length
    assert rows.more[TEACHER_PROMPTS].lengths.max() == 9
    whole, _ = make(solution_template="{successful_previous_attempt}" + " apples" * longest)
    rows = whole.make_rollout_batch(0)
    lengths = rows.more[TEACHER_PROMPTS].lengths + rows.completions.lengths
    assert lengths.max() == longest and whole.train().training_loss > 0


def test_the_loss_is_the_mean_over_completions_whose_teacher_is_shown_more() -> None:
    trainer, keep = run(distillation_alpha=0.3)
    rows = trainer._rollout_batch
    losses = row_losses(initial(), trainer, lambda own, theirs: divergence(own, theirs, beta=0.3))
    shown = rows.per_row[REPROMPTED].tolist()
    assert 0 < sum(shown) < len(shown)
    kept = [row for row, is_shown in zip(losses, shown, strict=True) if is_shown]
    log = trainer.state.log_history[0]
    assert log["loss"] == pytest.approx(torch.stack([row.mean() for row in kept]).mean().item(), rel=1e-6)
    measured = {name.removeprefix("self_distillation/"): value for name, value in log.items()}
    assert measured["distillation_loss"] == pytest.approx(torch.cat(kept).mean().item(), rel=1e-9)
    assert log["tokens/trained"] == sum(len(row) for row in kept)
    assert log["tokens/filtered"] == sum(map(len, losses)) - log["tokens/trained"]
    scores = rows.per_row[SCORES].view(-1, 4)
    for name, value in {
        "reward_mean": scores.mean(), "reward_std": scores.std(), "reward_min": scores.min(), "reward_max": scores.max(),
        "group_reward_std_mean": scores.std(dim=1).mean(), "flat_group_fraction": (scores.std(dim=1) == 0).double().mean(),
        "success_group_fraction": scores.amax(dim=1).mean(), "success_sample_fraction": sum(shown) / len(shown),
        "reprompt_sample_fraction": sum(shown) / len(shown), "feedback_available_fraction": 0.0, "feedback_used_fraction": 0.0,
        "rewards/even": scores.mean(),
    }.items():  # fmt: skip
        assert measured[name] == pytest.approx(float(value), rel=1e-6), name
    assert max(gradient.abs().max() for gradient in keep.steps[0].values()) > 1e-5


def test_a_weight_below_1_adds_the_loss_of_grpo() -> None:
    settings = {"loss_type": "grpo", "max_steps": 2, "num_iterations": 2, "learning_rate": 0.0}
    mixed, both = run(**settings, distillation_weight=0.25)
    alone = run(**{**settings, "loss_type": "dapo"})[1]
    policy, of_policy = make(GRPOConfig, num_generations=4, **settings)
    policy.train()
    for whole, one, other in zip(both.steps, alone.steps, of_policy.steps, strict=True):
        for name, gradient in whole.items():
            expected = 0.25 * one[name] + 0.75 * other[name]
            torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-12)
    found = mixed.state.log_history[0]["self_distillation/policy_loss"]
    assert found == pytest.approx(policy.state.log_history[0]["loss"], abs=1e-6)


@pytest.mark.parametrize("weight", [1.0, 0.999])
def test_evaluations_report_the_divergence(weight: float) -> None:
    trainer, _ = make(
        distillation_mode="sampled_token", distillation_alpha=1.0, teacher_model_kind="live", distillation_weight=weight,
        max_completion_length=1, per_device_eval_batch_size=16, num_generations_eval=4,
    )  # fmt: skip
    log = trainer.evaluate(Dataset.from_list(ROWS))
    found = log["eval_self_distillation/distillation_loss"]
    policy = log.get("eval_self_distillation/policy_loss", 0.0)
    assert abs(found) > 1e-4
    assert log["eval_loss"] == pytest.approx(weight * found + (1 - weight) * policy, rel=1e-5)


def test_nothing_to_learn_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="trl.experimental.sdpo.sdpo_trainer"):
        trainer, keep = run(
            max_steps=4,
            diagnostics_warning_interval=2,
            reward=lambda completions, **_: [0.0] * len(completions),
        )
    warned = [record.getMessage() for record in caplog.records if "rollout batches" in record.getMessage()]
    assert [text.split(" rollout")[0] for text in warned] == ["In the last 2"] * 3 + ["In the last 4"] * 3
    assert all(not gradient.any() for step in keep.steps for gradient in step.values())
    assert trainer.state.log_history[0]["loss"] == 0


def test_what_is_refused(tmp_path: Any) -> None:
    for settings, name in (
        ({"beta": 0.1}, "beta"),
        ({"dynamic_sampling": True}, "dynamic_sampling"),
        ({"distillation_mode": "topk_logits"}, "distillation_topk"),
        ({"use_successful_as_teacher": False}, "include_environment_feedback"),
        ({"reprompt_template": "{prompt}{feedback}"}, "{solution}"),
        ({"solution_template": "right"}, "{successful_previous_attempt}"),
        ({"distillation_weight": 1.5}, "distillation_weight"),
        ({"distillation_weight": 0.0}, "distillation_weight"),
        ({"teacher_model_init_kwargs": {"dtype": "float32"}}, "teacher_model_init_kwargs"),
        ({"num_generations": 1}, "num_generations=1"),
        (
            {"num_generations": 1, "include_environment_feedback": True, "distillation_weight": 0.5},
            "num_generations=1",
        ),
    ):
        with pytest.raises(ValueError, match=name.replace("{", r"\{")):
            SDPOConfig(str(tmp_path), use_cpu=True, **settings)
    feedback = {"use_successful_as_teacher": False, "include_environment_feedback": True}
    for settings in (
        {"epsilon": 0.3},
        {"vllm_importance_sampling_correction": False},
        {"vllm_importance_sampling_cap": 2.0},
        {"feedback_template": "{feedback_raw}"},
        {"dont_reprompt_on_self_success": False, **feedback},
        {"environment_feedback_only_without_solution": True, **feedback},
        {"remove_thinking_from_demonstration": True, **feedback},
        {"solution_template": "{successful_previous_attempt}", **feedback},
    ):
        with pytest.warns(UserWarning, match=f"{next(iter(settings))}=.* has no effect"):
            SDPOConfig(str(tmp_path), use_cpu=True, **settings)
    with pytest.raises(ValueError, match="reward_funcs"):
        make(reward=None)
    with pytest.raises(ValueError, match="no column 'privileged_context'"):
        make(rows=[{"prompt": "Next."}] * 4, include_environment_feedback=True)
    odd = [*ROWS[:3], {**ROWS[3], "privileged_context": None}]
    make(rows=odd, include_environment_feedback=True)
    odd = [{"prompt": "Next.", "privileged_context": [{"role": "user", "content": "Right."}]}] * 4
    with pytest.raises(ValueError, match="row 0: privileged_context"):
        make(rows=odd, include_environment_feedback=True)
    with pytest.raises(ValueError, match="row 0: the prompt ends with"):
        make(rows=[{"prompt": [{"role": "assistant", "content": "a"}]}] * 4)
