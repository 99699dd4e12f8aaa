"""Per-sequence quantities from token log-probs: sums, means, counts.

A scoring forward returns K token log-probs, `logps (K,)`, and the sequence of each, `sequence (K,)`. With
`prompt + [chosen, rejected]` groups, sequence 2i is pair i's chosen completion and 2i + 1 its rejected one.
"""

import torch
from torch import Tensor


def sum_by_sequence(values: Tensor, sequence: Tensor, count: int) -> Tensor:
    """Sum of the values of each sequence, `(K,) -> (count,)`; 0 for a sequence without tokens.

    `sequence` is int64 `(K,)` in `[0, count)`, in any order. Sums are float64 (float32 on a device without it): the
    difference of two long ones, a log-ratio, keeps its terms' digits. They are bit-exact in every run, also on GPUs.

    >>> sum_by_sequence(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 2]), count=3)
    tensor([3., 0., 4.], dtype=torch.float64)
    """
    wide = values.to(torch.float32 if values.device.type == "mps" else torch.float64)
    totals = wide.new_zeros(count)
    if wide.is_cuda:  # index_add is not deterministic there; an accumulating index_put sorts first
        return totals.index_put((sequence,), wide, accumulate=True)
    return totals.index_add(0, sequence, wide)


def tokens_by_sequence(sequence: Tensor, count: int) -> Tensor:
    """Number of tokens of each sequence, `(K,) -> (count,)` int64.

    >>> tokens_by_sequence(torch.tensor([0, 0, 2]), count=3)
    tensor([2, 0, 1])
    """
    return torch.bincount(sequence, minlength=count)


def mean_by_sequence(values: Tensor, sequence: Tensor, count: int) -> Tensor:
    """Mean of the values of each sequence, `(K,) -> (count,)`; 0 for a sequence without tokens.

    >>> mean_by_sequence(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 2]), count=3)
    tensor([1.5000, 0.0000, 4.0000], dtype=torch.float64)
    """
    return sum_by_sequence(values, sequence, count) / tokens_by_sequence(sequence, count).clamp(min=1)


def positions_in_sequence(sequence: Tensor, count: int) -> Tensor:
    """Index of each token within its own sequence, in order of appearance, `(K,) -> (K,)` int64.

    >>> positions_in_sequence(torch.tensor([0, 0, 1, 0, 1]), count=2)
    tensor([0, 1, 0, 2, 1])
    """
    lengths = tokens_by_sequence(sequence, count)
    starts = lengths.cumsum(0) - lengths
    order = sequence.argsort(stable=True)
    ranks = torch.arange(len(sequence), device=sequence.device) - starts[sequence[order]]
    return torch.empty_like(ranks).index_put((order,), ranks)


def split_pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """Chosen and rejected of alternating sequences, `(2B, ...) -> (B, ...), (B, ...)`. Raises: ValueError for odd ones.

    >>> split_pairs(torch.tensor([1, 2, 3, 4]))
    (tensor([1, 3]), tensor([2, 4]))
    """
    if len(values) % 2:
        raise ValueError(f"pairs need an even number of sequences, got {len(values)}.")
    return values[0::2], values[1::2]


def length_desensitized(logps: Tensor, sequence: Tensor, count: int, *, alpha: float) -> Tensor:
    """Log-prob of each sequence with the tokens past its pair's shorter length scaled by `alpha`, `(K,) -> (count,)`.

    Sequences 2i and 2i + 1 are a pair; `alpha` in [0, 1], where 1 gives plain sums and 0 compares the common length
    only. Use it on policy and reference alike. Raises ValueError for another alpha or an odd count.
    Source: Liu et al. 2024, LD-DPO (arXiv:2409.06411).

    >>> logps, sequence = torch.tensor([-1.0, -2.0, -4.0, -3.0]), torch.tensor([0, 0, 0, 1])
    >>> length_desensitized(logps, sequence, count=2, alpha=0.5)
    tensor([-4., -3.], dtype=torch.float64)
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"ld_alpha must be in [0, 1], got {alpha}. Use None for plain log-probabilities.")
    common = torch.minimum(*split_pairs(tokens_by_sequence(sequence, count))).repeat_interleave(2)
    inside = positions_in_sequence(sequence, count) < common[sequence]
    return sum_by_sequence(torch.where(inside, logps, alpha * logps), sequence, count)


def alignment_by_sequence(logps: Tensor, log_collision: Tensor, sequence: Tensor, count: int) -> Tensor:
    """Mean over each sequence of `log p(token) - log sum_v p(v)^2`, in nats, `(K,) -> (count,)`.

    `log_collision` `(K,)` is the log of the probability that two draws at the token's position agree. A sequence that
    the policy sampled is near 0; detached. Source: Zhou et al. 2024, WPO with sampled alignment (arXiv:2406.11827).

    >>> p = torch.tensor([0.5, 0.5]).log()  # a fair coin: log(0.5^2 + 0.5^2) = log 0.5
    >>> alignment_by_sequence(p, p, torch.tensor([0, 0]), count=1)
    tensor([0.], dtype=torch.float64)
    """
    return mean_by_sequence((logps - log_collision).detach(), sequence, count)


def wpo_weights(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Weight in (0, 1] of each pair under the policy, from its completions' alignments, `(B,), (B,) -> (B,)`.

    The product of the two completions' weights, at most 1. Source: Zhou et al. 2024, WPO (arXiv:2406.11827).

    >>> wpo_weights(torch.tensor([-0.5, 3.0]), torch.tensor([-0.5, -1.0]))
    tensor([0.3679, 1.0000])
    """
    return (chosen + rejected).detach().clamp(max=0).exp()
