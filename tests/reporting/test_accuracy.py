import math

import numpy as np
import pytest
from transformers import EvalPrediction

from trl.reporting.metrics import compute_accuracy


def accuracy(predictions, labels):
    return compute_accuracy(EvalPrediction(np.array(predictions), np.array(labels)))["accuracy"]


def test_rewards_of_pairs():
    assert accuracy([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0]], [0, 0, 0]) == pytest.approx(2 / 3)


def test_classes_of_tokens_without_those_that_have_none():
    logits = [[[0.9, 0.1], [0.2, 0.8], [0.0, 0.0]], [[0.6, 0.4], [0.3, 0.7], [9.0, 0.0]]]
    assert accuracy(logits, [[0, 1, -100], [1, 1, -100]]) == 0.75


def test_ties_are_left_out_and_counted(caplog):
    with caplog.at_level("WARNING"):
        assert accuracy([[1.0, 1.0], [2.0, 1.0], [1.0, 2.0]], [0, 0, 0]) == 0.5
    assert "1 of 3 predictions are ties" in caplog.text


def test_nothing_to_count():
    assert math.isnan(accuracy([[[0.9, 0.1]]], [[-100]]))


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="labels must have the shape"):
        accuracy([[1.0, 2.0]], [[0, 1]])
