"""Policy losses of GRPO and its relatives, and RLOO's: from completions and their advantages to unreduced terms.

Everything per token is flat, `(K,)`, with the row of each token in `sequence`; log-probs in nats.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trl.objectives.group_ratios import (
    RATIOS,
    GroupTokens,
    RatioLevel,
    ratios_of_sequence,
    row_means,
    row_sums,
    row_tokens,
    whole_ratios,
)
from trl.objectives.kl import check_shapes, k3
from trl.options.groups import OptionGroup, option
from trl.tensors.reduce import LossTerms, Weighted, weighted, where_counted
from trl.tensors.sequences import sum_by_sequence

Divisor = Literal["rows", "tokens", "rollout_tokens", "longest"]


class LossType(NamedTuple):
    """A surrogate per token, and what its loss is a mean over.

    "rows": the mean over rows of the mean over their tokens (with `row_sums`: of the sum); "tokens": tokens of the
    optimiser step; "rollout_tokens": those of the whole rollout batch, in equal shares to its optimiser steps;
    "longest": the tokens of rows of the greatest length. `ratios` replace those of `importance_sampling_level`.
    `parameters`: the settings that the surrogate reads, fields of the config.
    """

    surrogate: Callable[[Tensor, Tensor, Tensor, "GroupOptions"], Tensor]
    over: Divisor
    row_sums: bool = False
    parameters: tuple[str, ...] = ("epsilon", "epsilon_high", "delta")
    ratios: Callable[[Tensor, GroupTokens], Tensor] | None = None


LOSS_TYPES: dict[str, LossType] = {}  # filled below


@dataclass
class GroupOptions(OptionGroup):
    """The settings of `group_policy_loss`, fields of the config. `epsilon_high` None is `epsilon`."""

    loss_type: str = option(
        "dapo",
        "The loss, and what it is a mean over: 'grpo' (rows, each the mean of its tokens), 'dapo' (tokens of all "
        "completions generated at once), 'bnpo' (tokens of the optimiser step), 'dr_grpo' (rows times "
        "max_completion_length), 'cispo' (as dapo; ratios are weights of log-probabilities), 'sapo' (as grpo; a soft "
        "gate instead of clipping), 'luspo' (rows, each the sum of its tokens; sequence-level ratios), 'vespo' (as "
        "dapo; the ratio of the completion is a weight that fades far from 1).",
        choices=LOSS_TYPES,
    )
    importance_sampling_level: RatioLevel = option(
        "token",
        "Ratio of new to old probability that is clipped: of each 'token', of the 'sequence' (geometric mean over its "
        "tokens, GSPO), or 'sequence_token' (GSPO-token: with gradients of each token's own advantage).",
    )
    epsilon: float = option(0.2, "How far the ratio of new to old probability may leave 1 unclipped.", "> 0")
    epsilon_high: float | None = option(
        None, "How far it may rise above 1 (DAPO: 0.28); cispo: the largest weight (5.0). None: epsilon.", "(0, inf]"
    )
    delta: float | None = option(
        None, "Largest ratio for negative advantages, above 1 + epsilon_high (INTELLECT-2: 4). None: none.", "[1, inf]"
    )
    beta: float = option(0.0, "KL penalty against the reference, per nat, >= 0. 0 trains without a reference policy.")
    use_bias_correction_kl: bool = option(False, "Multiply the KL estimate by the ratio (DeepSeek-V3.2).")
    sapo_temperature_pos: float = option(1.0, "sapo: how fast the gate closes for advantages > 0.", "> 0")
    sapo_temperature_neg: float = option(1.05, "sapo: how fast the gate closes for advantages <= 0.", "> 0")
    vespo_k_pos: float = option(2.0, "vespo: the ratio W is a weight W^k exp(lambda (1 - W)); k for advantages > 0.")
    vespo_lambda_pos: float = option(3.0, "vespo: lambda for advantages > 0.")
    vespo_k_neg: float = option(3.0, "vespo: k for advantages <= 0.")
    vespo_lambda_neg: float = option(2.0, "vespo: lambda for advantages <= 0.")

    @property
    def high(self) -> float:
        """The upper epsilon."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


# ---- the loss of a token, from its ratio


def clipped(ratios: Tensor, logps: Tensor, advantages: Tensor, options: GroupOptions) -> Tensor:
    """`-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)`; with `delta`, the first r is at most that.

    Source: Schulman et al. 2017, eq. 7 (arXiv:1707.06347); two epsilons Yu et al. 2025, section 3.1 (arXiv:2503.14476);
    the bound where A < 0 Prime Intellect 2025, INTELLECT-2 (arXiv:2505.07291).
    """
    inside = ratios.clamp(1 - options.epsilon, 1 + options.high)
    return -torch.minimum(_bounded(ratios, options) * advantages, inside * advantages)


def weighted_likelihood(ratios: Tensor, logps: Tensor, advantages: Tensor, options: GroupOptions) -> Tensor:
    """`-min(r, epsilon_high) A log p` with a ratio that is a mere weight: no token loses its gradient (CISPO).

    `epsilon_high` is the largest weight itself, not what is added to 1. Source: MiniMax-M1 (arXiv:2506.13585).
    """
    return -ratios.detach().clamp(max=options.high) * advantages * logps


def soft_gated(ratios: Tensor, logps: Tensor, advantages: Tensor, options: GroupOptions) -> Tensor:
    """`-A sigmoid(tau (r - 1)) 4 / tau`: a gate that closes smoothly where clipping would cut off (SAPO).

    tau is `sapo_temperature_pos` where A > 0, else `sapo_temperature_neg`. At r = 1 its slope is that of r.
    Source: Gao et al. 2025 (arXiv:2511.20347).
    """
    tau = _by_sign(advantages, options.sapo_temperature_pos, options.sapo_temperature_neg)
    return -advantages * soft_gate(ratios, tau)


def soft_gate(ratios: Tensor, temperature: float | Tensor) -> Tensor:
    """`sigmoid(tau (r - 1)) 4 / tau`, any shape.

    >>> soft_gate(torch.tensor([0.0, 1.0]), 2.0)
    tensor([0.2384, 1.0000])
    """
    return torch.sigmoid(temperature * (ratios - 1)) * (4 / temperature)


def gamma_weighted(ratios: Tensor, logps: Tensor, advantages: Tensor, options: GroupOptions) -> Tensor:
    """`-W^k exp(lambda (1 - W)) A log p` with W the ratio of the token's whole sequence, a mere weight (VESPO).

    k and lambda are `vespo_k_pos` and `vespo_lambda_pos` where A > 0, else those of `_neg`. The weight is 1 at W = 1,
    largest at k / lambda, and fades to both sides. Source: VESPO 2026 (arXiv:2602.10693).
    """
    return -gamma_weights(ratios, advantages, options) * advantages * logps


def gamma_weights(ratios: Tensor, advantages: Tensor, options: GroupOptions) -> Tensor:
    """The weight of each token in `gamma_weighted`, `(K,)`, detached; ratios from 0 on.

    >>> gamma_weights(torch.tensor([0.0, 1.0, 2.0]), torch.ones(3), GroupOptions())
    tensor([0.0000, 1.0000, 0.1991])
    """
    ratios = ratios.detach()
    k = _by_sign(advantages, options.vespo_k_pos, options.vespo_k_neg)
    decay = _by_sign(advantages, options.vespo_lambda_pos, options.vespo_lambda_neg)
    return torch.exp(torch.xlogy(k, ratios) + decay * (1 - ratios))


def _by_sign(advantages: Tensor, positive: float, other: float) -> Tensor:
    return torch.where(advantages > 0, advantages.new_tensor(positive), advantages.new_tensor(other))


LOSS_TYPES |= {
    "grpo": LossType(clipped, "rows"),  # Shao et al. 2024 (arXiv:2402.03300)
    "bnpo": LossType(clipped, "tokens"),
    "dapo": LossType(clipped, "rollout_tokens"),  # Yu et al. 2025 (arXiv:2503.14476)
    "dr_grpo": LossType(clipped, "longest"),  # Liu et al. 2025 (arXiv:2503.20783)
    "cispo": LossType(weighted_likelihood, "rollout_tokens", parameters=("epsilon_high",)),
    "sapo": LossType(soft_gated, "rows", parameters=("sapo_temperature_pos", "sapo_temperature_neg")),
    "luspo": LossType(clipped, "rows", row_sums=True),  # 2026: a sequence's loss in GSPO times its length
    "vespo": LossType(
        gamma_weighted, "rollout_tokens", ratios=ratios_of_sequence,
        parameters=("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    ),
}  # fmt: skip


def group_policy_loss(
    logps: Tensor, tokens: GroupTokens, options: GroupOptions, *, entropies: Tensor | None = None
) -> LossTerms:
    """The terms of a micro-batch: per row `(B,)` or per token `(K,)`, as the loss type's mean is.

    `logps (K,)` with gradient. A token's surrogate is multiplied by `chosen` and `correction`; `beta` times the k3
    estimate of the divergence from `ref_logps` is added after that (with `use_bias_correction_kl`, times the ratio:
    then its gradient is that of the divergence of the present policy; DeepSeek-V3.2, arXiv:2512.02556). Divide by the
    sum of `divisor_share` over the optimiser step. Metrics: `clip_metrics`, `kl` with a beta, `entropy` if given.

    >>> advantages, rows = torch.tensor([1.0, 1.0, -1.0]), torch.tensor([0, 0, 1])
    >>> tokens = GroupTokens(torch.zeros(3), advantages, torch.ones(3), rows, count=2)
    >>> group_policy_loss(torch.zeros(3), tokens, GroupOptions("grpo")).values
    tensor([-1.,  1.], dtype=torch.float64)
    """
    check_shapes(tokens.mask, logps=logps)
    mask = tokens.mask
    values, ratios, divergence = _judged(logps, tokens, options)
    metrics = clip_metrics(ratios, where_counted(tokens.advantages, mask), tokens, options)
    if divergence is not None:
        metrics["kl"] = weighted(divergence, mask)
    if entropies is not None:
        metrics["entropy"] = weighted(entropies, mask)
    return terms_of_tokens(values, tokens, options.loss_type, metrics)


def terms_of_tokens(values: Tensor, tokens: GroupTokens, loss_type: str, metrics: Mapping[str, Weighted]) -> LossTerms:
    """Losses of tokens `(K,)` as the terms that a loss type's mean is over: of tokens, or of rows `(B,)`."""
    kind = LOSS_TYPES[loss_type]
    if kind.over != "rows":
        unit = "constant" if kind.over == "longest" else "token"
        return LossTerms(values, (tokens.mask != 0).to(values.dtype), unit, metrics)
    rows = row_sums(values, tokens)
    rows = rows if kind.row_sums else rows / row_tokens(tokens).clamp(min=1)
    return LossTerms(rows, torch.ones_like(rows), "sequence", metrics)


class _Judged(NamedTuple):
    """Each token's loss `(K,)`, the surrogate's ratio, and with a beta the divergence."""

    values: Tensor
    ratios: Tensor
    divergence: Tensor | None


def _judged(logps: Tensor, tokens: GroupTokens, options: GroupOptions) -> _Judged:
    kind, mask, divergence = LOSS_TYPES[options.loss_type], tokens.mask, None
    logps = where_counted(logps, mask)
    advantages = where_counted(tokens.advantages, mask).detach().to(logps.dtype)
    ratios = (kind.ratios or RATIOS[options.importance_sampling_level])(logps, tokens)
    values = kind.surrogate(ratios, logps, advantages, options)
    for factor in (tokens.chosen, tokens.correction):
        if factor is not None:
            values = values * where_counted(factor.detach().to(values.dtype), mask)
    if options.beta:
        assert tokens.ref_logps is not None
        divergence = k3(logps, where_counted(tokens.ref_logps.detach().to(logps.dtype), mask))  # 0 outside of the mask
        if options.use_bias_correction_kl:
            divergence = divergence * RATIOS[options.importance_sampling_level](logps, tokens)
        values = values + options.beta * divergence
    return _Judged(values, ratios, divergence)


def token_losses(tokens: GroupTokens, options: GroupOptions) -> Callable[[Tensor, slice], Tensor] | None:
    """`(log-probs of some tokens (C,), which of them) -> what each adds to the terms of `group_policy_loss`, (C,)`.

    None where a token's ratio is that of its sequence: then its loss does not follow from its own log-prob.

    >>> advantages, rows = torch.tensor([1.0, 1.0, -1.0]), torch.tensor([0, 0, 1])
    >>> tokens = GroupTokens(torch.zeros(3), advantages, torch.ones(3), rows, count=2)
    >>> token_losses(tokens, GroupOptions("grpo"))(torch.zeros(2), slice(1, 3))
    tensor([-0.5000,  1.0000])
    """
    kind, weights = LOSS_TYPES[options.loss_type], (tokens.mask != 0).double()
    if options.importance_sampling_level != "token" or kind.ratios is not None:
        return None
    if kind.over == "rows" and not kind.row_sums:
        weights = weights / row_tokens(tokens).clamp(min=1)[tokens.sequence]

    def losses(logps: Tensor, which: slice) -> Tensor:
        values = _judged(logps, tokens.part(which), options).values
        return where_counted(values, weights[which]) * weights[which].to(values.dtype)

    return losses


def sequence_policy_loss(
    logps: Tensor, tokens: GroupTokens, options: GroupOptions, *, entropies: Tensor | None = None
) -> LossTerms:
    """RLOO's terms, per row `(B,)`: the clipped surrogate of the probability of the whole completion.

    A row's advantage is that of its tokens, which must be one. The ratio is a product over tokens, not a mean. A row
    without a trained token has a ratio of 1 and no gradient. Source: Ahmadian et al. 2024 (arXiv:2402.14740).

    >>> tokens = GroupTokens(torch.zeros(2), torch.tensor([2.0, 2.0]), torch.ones(2), torch.tensor([0, 0]), count=1)
    >>> sequence_policy_loss(torch.log(torch.tensor([1.5, 0.7])), tokens, GroupOptions()).values
    tensor([-2.1000], dtype=torch.float64)
    """
    check_shapes(tokens.mask, logps=logps)
    logps = where_counted(logps, tokens.mask)
    ratios = whole_ratios(logps, tokens)
    # Not only of trained tokens: a row whose tokens are all masked keeps its share of the loss that is reported.
    advantages = sum_by_sequence(tokens.advantages.detach(), tokens.sequence, tokens.count)
    advantages = advantages / torch.bincount(tokens.sequence, minlength=tokens.count).clamp(min=1)
    values = clipped(ratios, ratios, advantages, options)
    metrics = _clip_shares(ratios, advantages, torch.ones_like(ratios), options)
    if entropies is not None:
        metrics["entropy"] = weighted(entropies, tokens.mask)
    return LossTerms(values, torch.ones_like(values), "sequence", metrics)


def divisor_share(
    loss_type: str, mask: Tensor, rows: int, *, rollout_tokens: float | Tensor = 0, rollout_rows: int = 1,
    longest: int = 0,
) -> Tensor:  # fmt: skip
    """Share of `rows` rows in a loss's divisor, 0-dim float64; shares of an optimiser step add up.

    `mask (K,)` of their tokens. `rollout_tokens` and `rollout_rows`: completion tokens (those of truncated completions
    too, whether trained or not) and rows of the whole batch of rollouts, over all processes ("dapo", "cispo": each row
    of a step brings an equal share of them); `longest`: max_completion_length ("dr_grpo").

    >>> divisor_share("dapo", torch.ones(7), 2, rollout_tokens=60, rollout_rows=20)
    tensor(6., dtype=torch.float64)
    """
    over = LOSS_TYPES[loss_type].over
    trained = (mask != 0).sum()
    wide = torch.float32 if mask.device.type == "mps" else torch.float64
    of_batch = torch.as_tensor(rollout_tokens, dtype=wide, device=mask.device) * rows / rollout_rows
    shares = {"rows": rows, "tokens": trained, "rollout_tokens": of_batch, "longest": rows * longest}
    return torch.as_tensor(shares[over], dtype=wide, device=mask.device)


# ---- which tokens, and what is logged


def entropy_threshold(entropies: Tensor, mask: Tensor, top: float) -> Tensor:
    """The entropy that the `top` share of the trained tokens of a whole batch reach, 0-dim.

    `chosen` is then `entropies >= threshold`. It lies below the quantile by a rounding error: positions with the same
    context have equal entropies but for rounding, and are chosen together. Source: Wang et al. (arXiv:2506.01939).

    >>> entropy_threshold(torch.tensor([1.0, 2.0, 3.0, 9.0]), torch.tensor([1, 1, 1, 0]), 0.5)
    tensor(2.0000)
    """
    known = entropies.detach()[mask != 0].to(torch.promote_types(entropies.dtype, torch.float32))
    if not len(known):
        return entropies.new_zeros(())
    ordered, place = known.sort().values, (1 - top) * (len(known) - 1)  # torch.quantile takes at most 2^24 values
    quantile = torch.lerp(ordered[int(place)], ordered[math.ceil(place)], place - int(place))
    return (quantile * (1 - 16 * torch.finfo(known.dtype).eps)).to(entropies.dtype)


# From the mean of a micro-batch (on one process) to the extreme over those that share a step.
EXTREMES = {"clip_ratio/low_min": "clip_ratio/low_mean", "clip_ratio/high_max": "clip_ratio/high_mean"}


def clip_metrics(ratios: Tensor, advantages: Tensor, tokens: GroupTokens, options: GroupOptions) -> dict[str, Weighted]:
    """The documented shares of what is clipped, of tokens or sequences (as the ratio is); ratios after `delta`.

    `clip_ratio/low_mean` (below, with A < 0), `/high_mean` (above, with A > 0) and `/region_mean` (either); for CISPO
    `cispo_clip_ratio`; none for SAPO; for VESPO `vespo/phi_seq_mean`, the mean weight of a sequence.
    """
    surrogate, mask = LOSS_TYPES[options.loss_type].surrogate, tokens.mask
    if surrogate is gamma_weighted:
        weights = row_means(gamma_weights(ratios, advantages, options), tokens)
        return {"vespo/phi_seq_mean": weighted(weights, row_tokens(tokens) > 0)}
    ratios = _bounded(ratios, options)
    if options.importance_sampling_level == "sequence":
        ratios, advantages = row_means(ratios, tokens), row_means(advantages, tokens)
        mask = torch.ones_like(ratios)
    if surrogate is weighted_likelihood:
        capped = (ratios > options.high) & (advantages > 0)
        return {"cispo_clip_ratio": weighted(capped, mask)}
    return _clip_shares(ratios, advantages, mask, options) if surrogate is clipped else {}


def _clip_shares(ratios: Tensor, advantages: Tensor, mask: Tensor, options: GroupOptions) -> dict[str, Weighted]:
    low = (ratios < 1 - options.epsilon) & (advantages < 0)
    high = (ratios > 1 + options.high) & (advantages > 0)
    return {
        "clip_ratio/low_mean": weighted(low, mask),
        "clip_ratio/high_mean": weighted(high, mask),
        "clip_ratio/region_mean": weighted(low | high, mask),
    }


def _bounded(ratios: Tensor, options: GroupOptions) -> Tensor:
    return ratios if options.delta is None else ratios.clamp(max=options.delta)


# ---- PAPO: the policy should answer differently when its images are masked


@dataclass(frozen=True, slots=True)
class PerceptionOptions:
    """The weights of PAPO's terms, under the names of the config, which checks them."""

    perception_loss_weight: float = 0.1
    der_loss_weight1: float = 0.03
    der_loss_weight2: float = 0.03

    @property
    def needs_entropies(self) -> bool:
        """Whether entropies are part of the loss."""
        return self.der_loss_weight1 > 0 or self.der_loss_weight2 > 0


def perception_loss(
    logps: Tensor, masked_logps: Tensor, tokens: GroupTokens, options: PerceptionOptions, *, loss_type: str,
    entropies: Tensor | None = None, masked_entropies: Tensor | None = None,
) -> LossTerms:  # fmt: skip
    """`-gamma KL(p || p_masked) + eta_1 H(p) + eta_2 H(p_masked)`, as the terms that `loss_type`'s mean is over.

    `logps` and `masked_logps` `(K,)`: of one policy, with the images and with masked images, both with gradient. The
    divergence is the k3 estimate from tokens of p. Entropies `(K,)` in nats, with gradient, of the whole distributions;
    needed where their weight is not 0. Metrics: `perception_kl`, `masked_entropy`. Source: Wang et al. 2025, PAPO
    (arXiv:2507.06448): the implicit perception loss and the double entropy loss.

    >>> tokens = GroupTokens(torch.zeros(2), torch.zeros(2), torch.ones(2), torch.tensor([0, 0]), count=1)
    >>> masked = torch.tensor([-1.0, -2.0])
    >>> options = PerceptionOptions(perception_loss_weight=1.0, der_loss_weight1=0.0, der_loss_weight2=0.0)
    >>> perception_loss(torch.tensor([-1.0, -1.0]), masked, tokens, options, loss_type="grpo").values
    tensor([-0.1839], dtype=torch.float64)
    """
    mask = tokens.mask
    check_shapes(mask, logps=logps, masked_logps=masked_logps)
    divergence = k3(where_counted(logps, mask), where_counted(masked_logps, mask))
    values = -options.perception_loss_weight * divergence
    metrics = {"perception_kl": weighted(divergence, mask)}
    if masked_entropies is not None:
        metrics["masked_entropy"] = weighted(masked_entropies, mask)
    weights = (options.der_loss_weight1, entropies), (options.der_loss_weight2, masked_entropies)
    for weight, entropy in weights:
        if weight and entropy is not None:
            values = values + weight * where_counted(entropy, mask)
    return terms_of_tokens(values, tokens, loss_type, metrics)
