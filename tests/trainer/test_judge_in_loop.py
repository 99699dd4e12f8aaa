"""Judges in the training loop: answers on disk, both orders, budgets, failures, and rewards beside the generation."""

import json
import logging
import threading
import time

import pytest
import torch

from tests.tiny import tiny_classifier
from tests.trainer.grpo_runs import even_tokens, logs, make, prompts, run
from tests.trainer.test_online_dpo_trainer import ONE, EvenJudge, SoftJudge
from tests.two_processes import launch
from trl.rewards import ManagedJudge, RewardError
from trl.scripts.online_dpo import make_parser

JUDGED = {**ONE, "reward_funcs": None}


class PrefersFirst(EvenJudge):
    """Prefers what it is shown first."""

    def judge(self, prompts, completions, shuffle_order=True):
        self.calls += len(prompts)
        return [0] * len(prompts)


def summary(trainer):
    return next(entry for entry in trainer.state.log_history if "train_loss" in entry)


def test_a_resumed_run_asks_nothing_twice(tmp_path):
    """And ends in the same logs, agreement of both orders included."""
    settings = {
        **JUDGED,
        "max_steps": 3,
        "judge_cache": str(tmp_path / "answers"),
        "judge_swap_positions": True,
    }
    judge = EvenJudge()
    first, _ = run(
        "online_dpo",
        **settings,
        given={"judge": judge},
        folder=str(tmp_path / "run"),
        save_strategy="steps",
        save_steps=1,
    )
    assert judge.calls and summary(first)["judge/calls"] == judge.calls
    assert 0 < logs(first)[0]["judge/agreement"] <= 1
    for step in (None, 1):
        judge = EvenJudge()
        again, _ = make("online_dpo", **settings, given={"judge": judge}, folder=str(tmp_path / f"again{step}"))
        again.train(resume_from_checkpoint=step and str(tmp_path / "run" / f"checkpoint-{step}"))
        assert judge.calls == 0 and summary(again)["judge/cached"] > 0
        assert logs(again)[-1] == logs(first)[-1]


def test_a_judge_that_prefers_a_position_teaches_nothing():
    trainer, _ = run("online_dpo", **JUDGED, judge_swap_positions=True, given={"judge": PrefersFirst()})
    log = logs(trainer)[0]
    assert (log["judge/agreement"], log["grad_norm"], log["reward"]) == (0, 0, 0.5)
    assert trainer.evaluate(prompts(4))["eval_judge/agreement"] == 0


def test_probabilities_are_used_where_a_judge_gives_them():
    trainer, _ = run("online_dpo", **JUDGED, given={"judge": SoftJudge()})
    scores = trainer._rollout_batch.per_row["scores"].tolist()
    assert {0.2, 0.8} <= {round(score, 9) for score in scores} <= {0.2, 0.5, 0.8}


class Answers(EvenJudge):
    """Gives the same answers each time, whatever is asked, after some seconds."""

    def __init__(self, answers, seconds=0.0):
        super().__init__()
        self.given, self.seconds = answers, seconds

    def judge(self, prompts, completions, shuffle_order=True):
        time.sleep(self.seconds)
        return self.given(len(prompts))


@pytest.mark.parametrize(
    ("answers", "settings", "message"),
    [
        (lambda n: [0] * (n - 1), {}, "answers, expected"),
        (lambda n: [2] * n, {}, "gave 2"),
        (lambda n: [float("nan")] * n, {}, "gave nan"),
        (lambda n: 1 / 0, {}, "ZeroDivisionError"),
        (lambda n: [0] * n, {"judge_max_calls": 0}, "max_calls=0"),
        (lambda n: [0] * n, {"reward_deadline": 0.05}, "did not answer within 0.05 s"),
    ],
    ids=["too few", "2", "NaN", "raises", "budget", "late"],
)
def test_failures_end_the_run_or_are_skipped(answers, settings, message, caplog):
    given = {"judge": Answers(answers, seconds=60 * settings.get("reward_deadline", 0.0))}
    with pytest.raises(RewardError, match=f"Answers.*{message}"):
        run("online_dpo", **JUDGED, **settings, given=given)
    with caplog.at_level(logging.WARNING):
        trainer, _ = run("online_dpo", **JUDGED, **settings, reward_failure="skip", given=given)
    assert message in caplog.text
    assert logs(trainer)[0]["grad_norm"] == 0


def test_ties_of_a_judge_are_dropped_or_learned_from_in_both_orders():
    ties = {"judge": Answers(lambda n: [0.5] * n)}
    norms = [
        logs(run("online_dpo", **JUDGED, tie_policy=policy, given=ties)[0])[0]["grad_norm"]
        for policy in ("drop", "both")
    ]
    assert norms[0] == 0 < norms[1]


def test_settings_of_judges():
    with pytest.raises(ValueError, match=r"judge_retries.*ManagedJudge"):
        make("online_dpo", **JUDGED, judge_retries=1, given={"judge": ManagedJudge(EvenJudge())})
    trainer, _ = make("online_dpo", **JUDGED, given={"judge": ManagedJudge(EvenJudge())})
    assert trainer.rewards.names == ("EvenJudge",)
    with pytest.warns(UserWarning, match="judge_cache='answers' has no effect without a judge"):
        make("online_dpo", **ONE, judge_cache="answers")


def test_the_commands_have_the_settings(tmp_path):
    words = "--judge random --judge_cache a.sqlite --judge_swap_positions true --judge_retries 2 --judge_max_calls 9"
    given = f"--output_dir {tmp_path} --use_cpu true --dataset_name x --model_name_or_path y {words}".split()
    args = next(each for each in make_parser().parse_args_and_config(given) if hasattr(each, "judge_cache"))
    assert (args.judge_cache, args.judge_swap_positions, args.judge_retries) == ("a.sqlite", True, 2)


# ---- rewards beside the generation


class Watches:
    """Scores as `even_tokens`; the first part waits until the next one is being generated."""

    def __init__(self):
        self.sizes, self.in_main, self.next_part, self.is_beside = [], [], threading.Event(), None

    def __call__(self, completion_ids, **columns):
        if not self.sizes:
            self.is_beside = self.next_part.wait(20)
        self.sizes.append(len(completion_ids))
        self.in_main.append(threading.current_thread() is threading.main_thread())
        return even_tokens(completion_ids)


@pytest.mark.parametrize("method", ["grpo", "online_dpo"])
def test_rewards_are_computed_while_the_next_part_is_generated(method):
    """In three parts, of whole groups: the same completions, scores and gradients, up to rounding."""
    rows = {"grpo": 10, "online_dpo": 5}[method]  # five groups of two
    settings = {
        "max_steps": 1,
        "num_generations": 2,
        "per_device_train_batch_size": rows,
        "log_format": "dict",
    }
    plain, kept = run(method, **settings)
    watches, parts = Watches(), []
    trainer, keep = make(method, **settings, generation_parts=3, reward_funcs=watches)
    generate = trainer.engine.generate

    def watched(prompts, *args, **kwargs):
        parts.append(len(prompts))
        if len(parts) == 2:
            watches.next_part.set()
        return generate(prompts, *args, **kwargs)

    trainer.engine.generate = watched
    trainer.train()
    assert watches.sizes == parts == [4, 4, 2] and watches.is_beside and not any(watches.in_main)
    for name, value in plain._rollout_batch.per_row.items():
        found = trainer._rollout_batch.per_row[name].tolist()
        assert found == pytest.approx(value.tolist(), rel=1e-9, nan_ok=True), name
    for name, value in kept.steps[0].items():
        torch.testing.assert_close(keep.steps[0][name], value, rtol=1e-7, atol=1e-10)


@pytest.mark.slow
def test_two_processes(tmp_path):
    """Share a cache, and train as one does: the judge in both orders, rewards beside the generation."""
    settings = {
        **JUDGED, "max_steps": 2, "judge": "tests.trainer.test_online_dpo_trainer.EvenJudge", "judge_swap_positions": True,
        "generation_parts": 2, "judge_cache": str(tmp_path / "answers"), "folder": str(tmp_path / "run"),
    }  # fmt: skip
    trainer, expected = run("online_dpo", **settings)
    cut = {**settings, "method": "online_dpo", "per_device_train_batch_size": 3}
    launch("tests.trainer.grpo_runs", str(tmp_path / "two.pt"), json.dumps(cut))
    found = torch.load(tmp_path / "two.pt")
    for own, known in zip(found["logs"], logs(trainer), strict=True):
        assert own["judge/agreement"] == pytest.approx(known["judge/agreement"], abs=1e-9)
    for name, value in expected.steps[1].items():
        torch.testing.assert_close(found["gradients"][1][name], value, rtol=1e-6, atol=1e-9)
    assert 0 <= found["eval"]["eval_judge/agreement"] <= 1


def test_an_error_of_a_part_ends_the_run():
    with pytest.raises(RewardError, match=r"EvenJudge.*gave 2"):
        run("online_dpo", **JUDGED, generation_parts=3, given={"judge": EvenJudge(a1=2)})


def test_reward_models_are_not_computed_beside_the_generation():
    model = tiny_classifier("llama", num_labels=1)
    with pytest.raises(ValueError, match="generation_parts=2"):
        make("online_dpo", **ONE, generation_parts=2, reward_funcs=model)
