"""Accuracy of what an evaluation predicted."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from transformers import EvalPrediction

from trl.tensors.padding import IGNORED

logger = logging.getLogger(__name__)


def compute_accuracy(eval_pred: EvalPrediction | tuple[Any, Any]) -> dict[str, float]:
    """Share of predictions whose largest value stands at the label: `{"accuracy": ...}`, for `compute_metrics`; also of a pair.

    `predictions (..., C)` and `labels (...)`: the two rewards of each pair with label 0, or the logits of each token with
    its class. Labels of -100 are not counted; nor are rows whose largest value stands twice, of which a warning says how
    many there are. NaN where nothing is counted.

    >>> compute_accuracy(EvalPrediction(np.array([[2.0, 1.0], [0.0, 3.0]]), np.array([0, 0])))
    {'accuracy': 0.5}
    """
    predictions, labels, *_ = map(np.asarray, eval_pred)
    if predictions.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels must have the shape of predictions without its last dimension, got {labels.shape} for predictions of "
            f"{predictions.shape}. Give one label per prediction, or -100."
        )
    predictions, labels = predictions[labels != IGNORED], labels[labels != IGNORED]
    tied = (predictions == predictions.max(axis=-1, keepdims=True)).sum(axis=-1) > 1
    if tied.any():
        logger.warning("%d of %d predictions are ties, which accuracy leaves out.", tied.sum(), len(tied))
    right = (predictions.argmax(axis=-1) == labels)[~tied]
    return {"accuracy": float(right.mean()) if len(right) else float("nan")}
