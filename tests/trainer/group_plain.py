"""GRPO's relatives and RLOO written out over a model's own logits, one completion at a time: what the trainers are compared with."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.trainer.dpo_plain import token_logps


class Row(NamedTuple):
    """One completion of a window: what is known of it before a step."""

    prompt: list[int]
    completion: list[int]
    trained: bool
    advantage: float
    old: Tensor
    ref: Tensor


def logps(model: Any, row: Any, temperature: float) -> Tensor:
    """Log-probs of the completion's tokens under the distribution at this temperature."""
    if temperature == 1:
        return token_logps(model, row.prompt, row.completion)
    logits = model(input_ids=torch.tensor([[*row.prompt, *row.completion]])).logits[
        0, len(row.prompt) - 1 : -1
    ]
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(row.completion)[:, None])[:, 0]


def advantages(rewards: Sequence[float], group: int, *, loo: bool, scale: str) -> list[float]:
    """Of rewards of whole groups: over the mean of the others, or over the group's mean and a deviation."""
    found, every = [], torch.tensor(rewards, dtype=torch.float64)
    for own in every.split(group):
        if own.max() == own.min():
            found += [0.0] * group
        elif loo:
            found += [float(r - (own.sum() - r) / (group - 1)) for r in own]
        else:
            deviation = {"group": own.std() + 1e-4, "batch": every.std() + 1e-4, "none": 1.0}[scale]
            found += ((own - own.mean()) / deviation).tolist()
    return found


def _clip(r: Tensor, a: float, s: Any) -> Tensor:
    high = s.epsilon if s.epsilon_high is None else s.epsilon_high
    bounded = r if getattr(s, "delta", None) is None else r.clamp(max=s.delta)
    return -torch.minimum(bounded * a, r.clamp(1 - s.epsilon, 1 + high) * a)


def _cispo(r: Tensor, a: float, s: Any, now: Tensor) -> Tensor:
    return -r.detach().clamp(max=s.epsilon_high) * a * now


def _sapo(r: Tensor, a: float, s: Any) -> Tensor:
    tau = s.sapo_temperature_pos if a > 0 else s.sapo_temperature_neg
    return -a * 4 / tau / (1 + torch.exp(-tau * (r - 1)))


def _vespo(log_ratios: Tensor, a: float, s: Any, now: Tensor) -> Tensor:
    whole = log_ratios.detach().sum().exp()
    k, decay = (s.vespo_k_pos, s.vespo_lambda_pos) if a > 0 else (s.vespo_k_neg, s.vespo_lambda_neg)
    return -(whole**k) * torch.exp(decay * (1 - whole)) * a * now


def _ratios(log_ratios: Tensor, level: str) -> Tensor:
    mean = log_ratios.mean().expand_as(log_ratios)
    own = log_ratios - log_ratios.detach()
    return {"token": log_ratios, "sequence": mean, "sequence_token": mean.detach() + own}[level].exp()


def token_losses(now: Tensor, row: Row, s: Any) -> tuple[Tensor, Tensor]:
    """The loss of each token, and its divergence from the reference."""
    log_ratios = now - row.old
    r, a = _ratios(log_ratios, s.importance_sampling_level), row.advantage
    surrogates: dict[str, Callable[[], Tensor]] = {
        "cispo": lambda: _cispo(r, a, s, now),
        "sapo": lambda: _sapo(r, a, s),
        "vespo": lambda: _vespo(log_ratios, a, s, now),
    }
    losses = surrogates.get(s.loss_type, lambda: _clip(r, a, s))()
    divergence = torch.exp(row.ref - now) - (row.ref - now) - 1
    divergence = divergence * r if s.use_bias_correction_kl else divergence
    return losses + s.beta * divergence, divergence


def step_loss(model: Any, rows: Sequence[Row], s: Any, window: Sequence[Row]) -> tuple[Tensor, float | None]:
    """The loss of an optimiser step's rows, and the mean divergence of its tokens (None for RLOO, which pays in rewards)."""
    total, kls, loss_type = torch.zeros((), dtype=torch.float64), [], getattr(s, "loss_type", None)
    for row in rows:
        now = logps(model, row, s.temperature)
        if loss_type is None:
            ratio = (now - row.old).sum().exp() if row.trained else torch.ones(())
            total = total + _clip(ratio, row.advantage, s)
        elif row.trained:
            losses, divergence = token_losses(now, row, s)
            total = total + (losses.mean() if loss_type in ("grpo", "sapo") else losses.sum())
            kls.append(divergence.detach())
    trained = sum(len(row.completion) for row in rows if row.trained)
    share = sum(len(row.completion) for row in window) * len(rows) / len(window)
    divisors = {"bnpo": trained, "dr_grpo": len(rows) * s.max_completion_length}
    divisors |= dict.fromkeys(("dapo", "cispo", "vespo"), share)
    kl = float(torch.cat(kls).mean()) if kls else None
    return total / max(divisors.get(str(loss_type), len(rows)), 1), kl


class Run:
    """A run of plain gradient descent on windows that a trainer made; the reference is the first policy."""

    def __init__(self, model: Any, settings: Any, rewards: Callable[..., list[float]]) -> None:
        self.model, self.s, self.rewards = model, settings, rewards
        self.reference = copy.deepcopy(model)
        self.rows: list[Row] = []

    @torch.no_grad()
    def take(self, prompts: list[list[int]], completions: list[list[int]], stopped: list[bool]) -> None:
        """Begin a window."""
        s, plain = self.s, [Row(p, c, True, 0.0, *[torch.empty(0)] * 2) for p, c in zip(prompts, completions, strict=True)]  # fmt: skip
        old = [logps(self.model, row, s.temperature) for row in plain]
        ref = [logps(self.reference, row, s.temperature) for row in plain]
        trained = [stop or not s.mask_truncated_completions for stop in stopped]
        rewards, loo = self.rewards(completion_ids=completions), not hasattr(s, "loss_type")
        if loo:
            gaps = [float((o - f).sum()) * t for o, f, t in zip(old, ref, trained, strict=True)]
            rewards = [reward - s.beta * gap for reward, gap in zip(rewards, gaps, strict=True)]
        scale = getattr(s, "scale_rewards", "none")
        found = advantages(rewards, s.num_generations, loo=loo, scale=scale)
        parts = zip(prompts, completions, trained, found, old, ref, strict=True)
        self.rows = [Row(*part) for part in parts]

    def step(self, numbers: Sequence[int]) -> tuple[dict[str, Tensor], float | None]:
        """One step on some rows of the window: its gradient, and the mean divergence."""
        self.model.zero_grad()
        loss, kl = step_loss(self.model, [self.rows[number] for number in numbers], self.s, self.rows)
        if loss.requires_grad:  # nothing of these rows may be trained
            loss.backward()
        found = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in self.model.named_parameters()
        }
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter -= self.s.learning_rate * found[name]
        return found, kl
