"""DPO's losses written out over a model's own logits, one row at a time: what the trainer is compared with."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu, softplus

Pairs = tuple[Tensor, Tensor, Tensor, Tensor]
"""Log-probs of chosen and rejected, under the policy and the reference, `(B,)` each."""


def token_logps(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """Log-prob of each token of a completion of a decoder."""
    ids = torch.tensor([[*prompt, *completion]])
    return _of_labels(model(input_ids=ids).logits[0, len(prompt) - 1 : -1], completion)


def decoder_logps(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """The same of an encoder-decoder."""
    labels = torch.tensor([list(completion)])
    return _of_labels(model(input_ids=torch.tensor([list(prompt)]), labels=labels).logits[0], completion)


def _of_labels(logits: Tensor, labels: Sequence[int]) -> Tensor:
    return logits.log_softmax(-1).gather(-1, torch.tensor(list(labels))[:, None])[:, 0]


def sums(model: Any, rows: Sequence[dict], *, of: Callable = token_logps, mean: bool = False) -> tuple[Tensor, Tensor]:
    """Log-probs `(B,)` of chosen and of rejected completions: sums over their tokens, or means."""
    found = []
    for side in ("chosen", "rejected"):
        each = [of(model, row["prompt_input_ids"], row[f"{side}_input_ids"]) for row in rows]
        found.append(torch.stack([logps.mean() if mean else logps.sum() for logps in each]))
    return found[0], found[1]


def pairs(policy: Any, reference: Any, rows: Sequence[dict], **options: Any) -> Pairs:
    """Log-probs under both; the reference's without gradient."""
    with torch.no_grad():
        ref = sums(reference, rows, **options)
    return (*sums(policy, rows, **options), *ref)


def gap(scores: Pairs) -> Tensor:
    chosen, rejected, ref_chosen, ref_rejected = scores
    return (chosen - ref_chosen) - (rejected - ref_rejected)


def _nca(scores: Pairs, beta: float) -> Tensor:
    chosen, rejected = beta * (scores[0] - scores[2]), beta * (scores[1] - scores[3])
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def _apo_zero(scores: Pairs, beta: float) -> Tensor:
    chosen, rejected = beta * (scores[0] - scores[2]), beta * (scores[1] - scores[3])
    return 1 - chosen.sigmoid() + rejected.sigmoid()


def _sppo(scores: Pairs, beta: float) -> Tensor:
    chosen, rejected = scores[0] - scores[2], scores[1] - scores[3]
    return (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2


LOSSES: dict[str, Callable[[Pairs, float], Tensor]] = {
    "sigmoid": lambda scores, beta: softplus(-beta * gap(scores)),
    "hinge": lambda scores, beta: relu(1 - beta * gap(scores)),
    "ipo": lambda scores, beta: (gap(scores) - 0.5 / beta) ** 2,
    "nca_pair": _nca,
    "apo_zero": _apo_zero,
    "sppo_hard": _sppo,
}
