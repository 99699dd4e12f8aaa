"""Statistics of minibatches become those of a step; nested ones of tensors become flat ones of numbers and arrays."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trl.reporting.step_statistics import (
    WANDB_PADDING,
    MinibatchRecord,
    stack_dicts,
    stats_to_np,
    step_statistics,
)


def test_stacked_rows_are_filled_up():
    found = stack_dicts([{"x": torch.ones(2, 2)}, {"x": torch.zeros(1)}])
    assert found["x"].tolist() == [[1, 1, 1, 1], [0, WANDB_PADDING, WANDB_PADDING, WANDB_PADDING]]
    assert stack_dicts([]) == {}


def test_numpy_values():
    found = stats_to_np(
        {"a": torch.tensor([[1.5]]), "b": torch.ones(3, dtype=torch.bfloat16), "c": 2, "d": np.float32(0.5)}
    )
    assert (found["a"], found["c"], found["d"]) == (1.5, 2, 0.5)
    assert found["b"].dtype == np.float32
    assert isinstance(found["d"], float)


def test_moments_of_minibatches_are_those_of_all_tokens_of_an_optimiser_step():
    steps = torch.tensor([1.0, 2.0, 4.0, 9.0, 5.0]).double(), torch.tensor([3.0, 7.0, 8.0, 1.0, 0.0]).double()
    record = MinibatchRecord(SimpleNamespace(num_processes=1))
    for values in steps:
        record.begin()
        for part in values.split([2, 3]):
            record.add(len(part), {"val/mean": part.mean(), "val/var": part.var()})
    found = record.summary()
    assert found["val/mean"].item() == pytest.approx(float(torch.stack(steps).mean()))
    assert found["val/var"].item() == pytest.approx(sum(float(values.var()) for values in steps) / 2)
    assert record.last("val/mean") == pytest.approx(float(steps[1].mean()))


def test_masked_tokens_are_in_no_statistic():
    alone = SimpleNamespace(num_processes=1, gather=lambda own: own)
    found = step_statistics(
        kl_coef=0.1, scores=torch.tensor([1.0, 5.0]), logprobs=torch.tensor([[-1.0, -9.0]] * 2),
        ref_logprobs=torch.tensor([[-2.0, -9.0]] * 2), non_score_reward=torch.zeros(2, 2), kls=torch.tensor([[0.5, 7.0]] * 2),
        masks=torch.tensor([[1, 0]] * 2), queries=[torch.zeros(3)] * 2, responses=[torch.zeros(1)] * 2, train_stats={},
        accelerator=alone,
    )  # fmt: skip
    assert found["objective/kl_dist"].tolist() == [0.5] * 2 and found["objective/logprobs"].tolist() == [-1.0] * 2
    assert found["tokens/queries_len_mean"] == 3.0 and found["tokens/responses_len_mean"] == 1.0
    assert found["ppo/std_scores"].item() == pytest.approx(8**0.5)
