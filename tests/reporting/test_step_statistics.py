"""Nested statistics of tensors become flat ones of numbers and arrays."""

import numpy as np
import pytest
import torch

from trl.reporting.step_statistics import WANDB_PADDING, flatten_dict, stack_dicts, stats_to_np


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


def test_a_key_with_the_separator_is_an_error():
    assert flatten_dict({"a": {"b": {"c": 1}}, "d": 2}, sep=".") == {"a.b.c": 1, "d": 2}
    with pytest.raises(ValueError, match="'a/b'"):
        flatten_dict({"a/b": 1})
