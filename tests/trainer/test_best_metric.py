"""metric_for_best_model is checked before the first step."""

import pytest
import torch
from datasets import Dataset

from tests.trainer import dpo_runs, grpo_runs
from tests.trainer.sft_runs import BLUE, USER, make

ROWS = [{"messages": [USER, BLUE]}] * 6
BEST = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "per_device_eval_batch_size": 4}  # fmt: skip


class Counting:
    """compute_metrics that counts the rows it is given."""

    def __init__(self):
        self.rows = []

    def __call__(self, found):
        self.rows.append(len(found.predictions))
        return {"score": 1.0}


def sft(metric, *, eval_dataset=None, compute_metrics=None, **settings):
    sets = Dataset.from_list(ROWS) if eval_dataset is None else eval_dataset
    given = {"eval_dataset": sets, "compute_metrics": compute_metrics}
    return make(ROWS, trainer=given, metric_for_best_model=metric, **{**BEST, "logging_steps": 1, **settings})


def test_a_name_that_no_evaluation_has_is_refused_before_the_first_step():
    counted = Counting()
    trainer = sft("scoer", compute_metrics=counted)
    with pytest.raises(ValueError, match=r"metric_for_best_model='scoer' is not among .*'eval_score'"):
        trainer.train()
    assert trainer.state.global_step == 0 and counted.rows == [4]  # one batch


class Plain(torch.utils.data.Dataset):
    """A PyTorch data set of tokenised rows."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return {"input_ids": [5, 6, 7], "labels": [5, 6, 7]}


def test_the_check_leaves_no_trace():
    plain, counted = sft("loss"), Counting()
    checked = sft("eval_score", compute_metrics=counted)
    for trainer in (plain, checked):
        trainer.train()
    assert counted.rows == [4, 6, 6]
    assert checked.state.best_metric == 1.0
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, checked.model.state_dict()[name]), name
    logs = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (plain, checked)]
    assert logs[0] == logs[1]


def test_names_of_several_sets():
    parts = {"short": Dataset.from_list(ROWS[:2]), "long": Dataset.from_list(ROWS)}
    with pytest.raises(ValueError, match=r"is of none of the evaluation sets \['short', 'long'\].*'eval_short_loss'"):
        sft("loss", eval_dataset=parts)
    assert sft("eval_long_entropy", eval_dataset=parts).train().global_step == 2
    counted = Counting()
    with pytest.raises(ValueError, match=r"'eval_long_scoer' is not among .*'eval_long_score'"):
        sft("eval_long_scoer", eval_dataset=parts, compute_metrics=counted).train()


def test_metrics_of_preferences_and_rewards():
    rows = Dataset.from_list(dpo_runs.pairs(count=4))
    best = {**BEST, "eval_dataset": rows, "save_strategy": "no"}
    assert dpo_runs.make(**best, metric_for_best_model="rewards/margins").train().global_step == 1
    with pytest.raises(ValueError, match=r"'reward/margin' is not among .*'eval_rewards/margins'"):
        dpo_runs.make(**best, metric_for_best_model="reward/margin").train()
    with pytest.raises(ValueError, match=r"'acc' is not among .* The screen's acc is 'rewards/accuracies'. Set that.$"):
        dpo_runs.make(**best, metric_for_best_model="acc").train()
    with pytest.raises(ValueError, match="The screen's acc is 'held_rewards/accuracies'"):
        dpo_runs.make(**{**best, "eval_dataset": {"held": rows}}, metric_for_best_model="eval_held_acc").train()
    best = {**BEST, "given": {"eval_dataset": grpo_runs.prompts(3)}, "save_strategy": "no", "max_steps": 1}
    with pytest.raises(ValueError, match=r"'eval_rewrad' is not among .*'eval_reward'"):
        grpo_runs.run(**best, metric_for_best_model="eval_rewrad")
    assert grpo_runs.run(**best, metric_for_best_model="eval_rewards/even_tokens/mean")[0].state.best_metric > 0


@pytest.mark.parametrize("result", [0.5, None])
def test_compute_metrics_must_return_a_dict(result):
    trainer = make(ROWS, trainer={"eval_dataset": Dataset.from_list(ROWS), "compute_metrics": lambda _: result})
    with pytest.raises(
        TypeError,
        match=f"compute_metrics must return a dict of metrics by name, got a {type(result).__name__}",
    ):
        trainer.evaluate()
