"""The tokens of a micro-batch of completions, and the ratios of the new policy to the old, of tokens and of sequences.

Everything per token is flat, `(K,)`, with the row of each token in `sequence`; log-probs in nats.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from trl.objectives.kl import LARGEST_LOG_RATIO, check_shapes
from trl.tensors.reduce import where_counted
from trl.tensors.sequences import sum_by_sequence
from trl.tensors.statistics import cap_exp

RatioLevel = Literal["token", "sequence", "sequence_token"]


_BESIDE_MASK = ("old_logps", "advantages", "sequence", "ref_logps", "correction", "chosen")


@dataclass(frozen=True, slots=True)
class GroupTokens:
    """Columns of a micro-batch's K completion tokens, in B = `count` rows, without the policy's log-probs.

    `old_logps`: under the policy that the ratio is taken to, None for the one that is being scored; `advantages`;
    `mask`: not 0 where a token is trained; `sequence`: int64, its row. All `(K,)`, as are, where they are wanted,
    `ref_logps`, `correction` (the factor of each token that makes up for another sampler,
    `sampler_correction.correction`) and `chosen` (bool: tokens whose surrogate counts; others keep KL and place).
    """

    old_logps: Tensor | None
    advantages: Tensor
    mask: Tensor
    sequence: Tensor
    count: int
    ref_logps: Tensor | None = None
    correction: Tensor | None = None
    chosen: Tensor | None = None

    def __post_init__(self) -> None:
        check_shapes(self.mask, **{name: getattr(self, name) for name in _BESIDE_MASK})

    def part(self, tokens: slice) -> "GroupTokens":
        """Some of the tokens; rows keep their numbers."""
        columns = {name: getattr(self, name) for name in ("mask", *_BESIDE_MASK)}
        return replace(self, **{name: value if value is None else value[tokens] for name, value in columns.items()})


def token_ratios(logps: Tensor, tokens: GroupTokens) -> Tensor:
    """`p / p_old` of each token with gradient, 1 outside of the mask (Schulman et al. 2017, arXiv:1707.06347)."""
    return cap_exp(log_ratios(logps, tokens), LARGEST_LOG_RATIO)


def sequence_ratios(logps: Tensor, tokens: GroupTokens) -> Tensor:
    """The geometric mean of a sequence's ratios, at each of its tokens, `(K,)`: GSPO (arXiv:2507.18071)."""
    return cap_exp(mean_log_ratios(logps, tokens), LARGEST_LOG_RATIO)


def sequence_token_ratios(logps: Tensor, tokens: GroupTokens) -> Tensor:
    """`sequence_ratios` in value; a token's gradient is its own alone: GSPO-token (arXiv:2507.18071)."""
    with_gradient = where_counted(logps - logps.detach(), tokens.mask)
    return cap_exp(mean_log_ratios(logps.detach(), tokens) + with_gradient, LARGEST_LOG_RATIO)


def whole_ratios(logps: Tensor, tokens: GroupTokens) -> Tensor:
    """`p / p_old` of whole sequences, `(B,)`: the product over their trained tokens, 1 for a row without one."""
    return cap_exp(row_sums(log_ratios(logps, tokens), tokens), LARGEST_LOG_RATIO)


def ratios_of_sequence(logps: Tensor, tokens: GroupTokens) -> Tensor:
    """`whole_ratios` at each token, `(K,)`, 1 outside of the mask."""
    spread = whole_ratios(logps, tokens)[tokens.sequence].to(logps.dtype)
    return spread.where(tokens.mask != 0, spread.new_ones(()))


RATIOS: dict[str, Callable[[Tensor, GroupTokens], Tensor]] = {
    "token": token_ratios,
    "sequence": sequence_ratios,
    "sequence_token": sequence_token_ratios,
}


def log_ratios(logps: Tensor, tokens: GroupTokens) -> Tensor:
    """`log p - log p_old` of trained tokens, 0 elsewhere; the old log-probs are constants."""
    old_logps = logps if tokens.old_logps is None else tokens.old_logps
    return where_counted(logps - old_logps.detach().to(logps.dtype), tokens.mask)


def mean_log_ratios(logps: Tensor, tokens: GroupTokens) -> Tensor:
    """The mean of a sequence's log-ratios, at each of its tokens, `(K,)`."""
    rows = row_sums(log_ratios(logps, tokens), tokens) / row_tokens(tokens).clamp(min=1)
    return where_counted(rows[tokens.sequence].to(logps.dtype), tokens.mask)


def row_sums(values: Tensor, tokens: GroupTokens) -> Tensor:
    """Sum over the trained tokens of each row, `(K,) -> (B,)` float64."""
    return sum_by_sequence(where_counted(values, tokens.mask), tokens.sequence, tokens.count)


def row_tokens(tokens: GroupTokens) -> Tensor:
    """Trained tokens of each row, `(B,)`."""
    return sum_by_sequence((tokens.mask != 0).float(), tokens.sequence, tokens.count)


def row_means(values: Tensor, tokens: GroupTokens) -> Tensor:
    """Mean over the trained tokens of each row, `(K,) -> (B,)`, detached; 0 where there are none."""
    return row_sums(values.detach(), tokens) / row_tokens(tokens).clamp(min=1)
