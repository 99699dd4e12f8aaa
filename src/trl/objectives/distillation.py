"""Distillation losses per token: how far the student's next-token distribution is from the teacher's.

`student` and `teacher` are logits over one vocabulary, already divided by their temperatures; p is the student's
distribution, q the teacher's. No loss has a factor of temperature squared.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trl.tensors.sequences import positions_in_sequence, sum_by_sequence
from trl.tensors.vocabulary_loss import Losses

LARGEST_GAP = 80.0  # nats; its exponential is finite in float32
LEAST_TAIL = 1e-7
"""The least probability of the tokens outside of a teacher's top k, whose log-probs are rounded."""


def divergence(student: Tensor, teacher: Tensor, *, beta: float) -> Tensor:
    """The generalised Jensen-Shannon divergence of each token, `(..., V), (..., V) -> (...)`, in nats.

    `beta KL(q | m) + (1 - beta) KL(p | m)` with `m = beta q + (1 - beta) p`; `beta=0` is the forward KL, `KL(q | p)`,
    and `beta=1` the reverse KL, `KL(p | q)`. Only the student's logits get a gradient. Sums are in float32 or wider.
    Raises: ValueError for a beta outside of [0, 1], unlike shapes. Source: Agarwal et al. 2024 (arXiv:2306.13649).

    >>> student, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    >>> [divergence(student, teacher, beta=beta).item() for beta in (0.0, 1.0)]
    [0.13081..., 0.14384...]
    """
    check_beta(beta)
    if student.shape != teacher.shape:
        raise ValueError(f"logits must have one shape, got {tuple(student.shape)}, {tuple(teacher.shape)}.")
    divergences = _Divergence.apply(student.flatten(0, -2), teacher.detach().flatten(0, -2), beta)
    assert isinstance(divergences, Tensor)
    return divergences.view(student.shape[:-1])


class _Divergence(torch.autograd.Function):
    """The gradient in closed form: for `D = sum_v f(p_v, q_v)`, `dD/dlogits = p (f' - sum_v p f')`."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, beta: float) -> Tensor:
        exact = torch.promote_types(torch.promote_types(student.dtype, teacher.dtype), torch.float32)
        log_p, log_q = student.log_softmax(-1, dtype=exact), teacher.log_softmax(-1, dtype=exact)
        p, gap = log_p.exp(), log_q - log_p
        del log_p
        if beta == 0:
            q = log_q.exp_()
            values, slopes = _expected(q, gap), p.sub_(q)
        elif beta == 1:
            values = _expected(p, gap.neg_())
            slopes = gap.sub_(values[:, None]).mul_(p)
        else:
            p_over_mix, q_over_mix = _over_mix(gap, beta)
            student_part = _expected(p, p_over_mix)
            values = beta * _expected(log_q.exp_(), q_over_mix) + (1 - beta) * student_part
            slopes = p_over_mix.sub_(student_part[:, None]).mul_(p).mul_(1 - beta)
        ctx.dtype = student.dtype
        ctx.save_for_backward(slopes.masked_fill_(p == 0, 0.0) if beta else slopes)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        (slopes,) = ctx.saved_tensors
        return (slopes * slope[:, None]).to(ctx.dtype), None, None


def _over_mix(gap: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """`log(p / m)` and `log(q / m)` of `gap = log(q / p)`, without loss of digits where beta is near 0 or 1.

    A gap beyond `LARGEST_GAP` is cut: what it belongs to has no probability in the mean. `gap` is overwritten.
    """
    p_over_mix = gap.clamp(max=LARGEST_GAP).expm1_().mul_(beta).log1p_().neg_()
    return p_over_mix, gap.neg_().clamp_(max=LARGEST_GAP).expm1_().mul_(1 - beta).log1p_().neg_()


def _expected(probabilities: Tensor, values: Tensor) -> Tensor:
    """The mean of `values` `(N, V)` under `probabilities`, where 0 times anything is 0."""
    return (probabilities * values).masked_fill_(probabilities == 0, 0.0).sum(-1)


def top_k_divergence(
    student: Tensor, tokens: Tensor, teacher_logps: Tensor, *, beta: float, tail: bool = True
) -> Tensor:
    """`divergence` over the k tokens that the teacher finds most likely, `(N, V), (N, k), (N, k) -> (N,)`.

    `teacher_logps` are log-probabilities of `tokens` under the teacher's whole distribution. With `tail` all other
    tokens are one more class; without it both distributions are renormalised. With k = V this is `divergence`.

    >>> student, teacher = torch.randn(2, 8), torch.randn(2, 8).log_softmax(-1)
    >>> best = teacher.topk(8)
    >>> exact = divergence(student, teacher, beta=0.5)
    >>> torch.allclose(top_k_divergence(student, best.indices, best.values, beta=0.5), exact)
    True
    """
    exact = torch.promote_types(student.dtype, torch.float32)
    student, teacher_logps = student.to(exact), teacher_logps.to(exact)
    kept = student.gather(-1, tokens)
    if tail and tokens.shape[-1] < student.shape[-1]:
        rest = student.scatter(-1, tokens, -math.inf).logsumexp(-1, keepdim=True)
        kept = torch.cat([kept, rest], dim=-1)  # logits: the common log-normaliser drops out
        mass = teacher_logps.logsumexp(-1, keepdim=True).exp()
        teacher_logps = torch.cat([teacher_logps, (1 - mass).clamp(min=LEAST_TAIL).log()], dim=-1)
    return divergence(kept, teacher_logps, beta=beta)


class TeacherLoss(Protocol):
    """A loss per token of a student `(C, V)` from what a teacher says about it; both at one temperature.

    It returns `(C,)`, or a pair of that and statistics `(C, M)` that are measured beside it.
    """

    def of_logits(self, student: Tensor, teacher: Tensor) -> Losses:
        """Of the teacher's logits `(C, V')`."""
        ...

    def of_top_k(self, student: Tensor, tokens: Tensor, teacher_logps: Tensor) -> Losses:
        """Of its k most likely tokens and their log-probs under its whole distribution, `(C, k)` each."""
        ...


@dataclass(frozen=True)
class Divergence(TeacherLoss):
    """`divergence` from teachers of any kind, over the vocabulary that both have. `tail`: see `top_k_divergence`."""

    beta: float
    tail: bool = True

    def of_logits(self, student: Tensor, teacher: Tensor) -> Tensor:
        if student.shape != teacher.shape:
            shared = min(student.shape[-1], teacher.shape[-1])
            student, teacher = student[:, :shared], teacher[:, :shared]
        return divergence(student, teacher, beta=self.beta)

    def of_top_k(self, student: Tensor, tokens: Tensor, teacher_logps: Tensor) -> Tensor:
        return top_k_divergence(student, tokens, teacher_logps, beta=self.beta, tail=self.tail)


def sorted_l1(student: Tensor, teacher: Tensor) -> Tensor:
    """The distance of two sorted distributions over different vocabularies, `(N, V), (N, V') -> (N,)`, in [0, 2].

    Both are probabilities; the smaller vocabulary is filled up with zeros. Only the student gets a gradient.
    Source: Boizard et al. 2024, eq. 5 (arXiv:2402.12030).

    >>> sorted_l1(torch.tensor([[0.25, 0.75]]), torch.tensor([[0.5, 0.0, 0.5]]))
    tensor([0.5000])
    """
    p, q = (x.sort(-1, descending=True).values for x in (student, teacher.detach()))
    width = max(p.shape[-1], q.shape[-1])
    p, q = (torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in (p, q))
    return (p - q).abs().sum(-1)


def reverse_kl_advantages(logps: Tensor, teacher_logps: Tensor) -> Tensor:
    """`log q - log p` of the sampled tokens, `(K,)`, detached: the advantages of on-policy distillation.

    Policy gradient with them minimises the reverse KL, whose estimate they are with the sign changed (`kl.k1`).
    Source: Agarwal et al. 2024, section 3 (arXiv:2306.13649); Gu et al. 2024, eq. 2 (arXiv:2306.08543).

    >>> reverse_kl_advantages(torch.tensor([-1.0]), torch.tensor([-3.0]))
    tensor([-2.])
    """
    return (teacher_logps - logps).detach()


def discounted_advantages(
    advantages: Tensor, sequence: Tensor, count: int, *, gamma: float, normalize: bool, skip: bool = False
) -> Tensor:
    """Sums of the rest of each sequence, `sum_(i >= t) gamma^(i - t) A_i`, `(K,) -> (K,)`.

    `normalize` divides by the sum of the weights; `skip` begins at the next token, for a loss that has the token's own
    divergence already. Tokens of a sequence are in order. Source: Gu et al. 2024, eq. 4 and 5 (arXiv:2306.08543).

    >>> discounted_advantages(torch.ones(3), torch.zeros(3).long(), 1, gamma=0.5, normalize=False)
    tensor([1.7500, 1.5000, 1.0000])
    """
    places = positions_in_sequence(sequence, count)
    width = int(places.max()) + 1 if len(places) else 0
    rows = advantages.new_zeros(2, count, width)
    rows[0, sequence, places], rows[1, sequence, places] = advantages.detach(), 1.0
    sums, rest = torch.zeros_like(rows), rows.new_zeros(2, count)
    for place in reversed(range(width)):
        later = gamma * rest
        rest = rows[:, :, place] + later
        sums[:, :, place] = later if skip else rest
    values, weights = sums[:, sequence, places]
    return values / weights.clamp(min=torch.finfo(values.dtype).tiny) if normalize else values


def prefix_weights(advantages: Tensor, sequence: Tensor, count: int, *, gamma: float, epsilon: float) -> Tensor:
    """`1 + gamma (1 - S_t / S)`, `(K,)`: `S_t` sums `|A|` before token t, S in the whole sequence (>= `epsilon`).

    Early tokens, whose prefix is still that of the teacher, weigh more. Source: IW-OPD (arXiv:2606.22600).

    >>> prefix_weights(torch.tensor([1.0, -1.0]), torch.tensor([0, 0]), 1, gamma=1.0, epsilon=1e-6)
    tensor([2.0000, 1.5000])
    """
    sizes = advantages.detach().abs()
    whole = sum_by_sequence(sizes, sequence, count).clamp(min=epsilon).to(sizes.dtype)
    before = discounted_advantages(sizes.flip(0), sequence.flip(0), count, gamma=1.0, normalize=False, skip=True)
    return 1 + gamma * (1 - before.flip(0) / whole[sequence])


def check_beta(beta: float) -> None:
    """Raise ValueError unless beta is in [0, 1]."""
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be in [0, 1], got {beta}. 0 is the forward KL and 1 the reverse KL.")
