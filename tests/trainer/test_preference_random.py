"""DPO's losses, KTO and reward models under settings drawn at random, against the formulas over a model's own outputs.

What all layouts have in common shows only here. One step in float64: gradients agree to 1e-9 of the largest.
"""

import math
import random
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import logsigmoid, relu, softplus

from tests.trainer import dpo_runs, kto_runs, reward_runs
from tests.trainer.dpo_plain import token_logps
from tests.trainer.kto_runs import assert_same_gradient, plain_gradient
from tests.trainer.preference_methods import DPO_LOSSES
from trl.models.scoring import base as scorer_base
from trl.tensors import heads

ARCHITECTURES = ("gpt2", "opt", "gpt_neox")  # nothing of theirs is rounded to float32 on the way
ROWS = 6


def tokens(draws: random.Random, *lengths: int) -> list[int]:
    """Any of the vocabulary: also ids of padding and of an end within a text."""
    return [draws.randrange(60) for _ in range(draws.choice(lengths))]


def pairs(draws: random.Random) -> list[dict[str, Any]]:
    """Prompts that come again; completions that begin alike, of which one begins the other, of very uneven lengths."""
    found: list[dict[str, Any]] = []
    for _ in range(ROWS):
        repeated = bool(found) and draws.random() < 0.3
        prompt = found[-1]["prompt_input_ids"] if repeated else tokens(draws, 1, 2, 9)
        chosen, rejected = tokens(draws, 1, 2, 5, 13), tokens(draws, 1, 2, 5, 13)
        kind = draws.choice(["free", "beginning", "longer"])
        shared = chosen[: len(rejected) // 2] if kind == "beginning" else chosen if kind == "longer" else []
        rejected = shared + rejected[0 if kind == "longer" else len(shared) :]
        found.append({"prompt_input_ids": prompt, "chosen_input_ids": chosen, "rejected_input_ids": rejected})
    return found


def layout(draws: random.Random, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """How a step of six rows is cut and laid out."""
    if draws.random() < 0.3:
        monkeypatch.setattr(scorer_base, "packed_unsupported", lambda core: "this test wants padded rows")
    size = draws.choice([1, 3, 512])
    monkeypatch.setattr(heads, "default_chunk_size", lambda *args, **kwargs: size)
    rows = draws.choice([2, 3, 6])
    return {
        "per_device_train_batch_size": rows, "gradient_accumulation_steps": ROWS // rows,
        "prefix_sharing": draws.choice(["auto", False]), "gradient_checkpointing": draws.random() < 0.3,
    }  # fmt: skip


# ---- DPO


def cut(row: dict[str, Any], side: str, args: Any) -> tuple[list[int], list[int]]:
    """A side's prompt and completion: the last or first `max_length` tokens; the first of none but a completion is its prompt."""
    prompt, completion = row["prompt_input_ids"], row[f"{side}_input_ids"]
    whole, excess = prompt + completion, len(prompt) + len(completion) - (args.max_length or math.inf)
    if excess > 0 and args.truncation_mode == "keep_end":
        kept = whole[-args.max_length :]
        bound = max(len(prompt) - int(excess), 0) or 1
        return kept[:bound], kept[bound:]
    kept = whole if excess <= 0 else whole[: args.max_length]
    return kept[: len(prompt)], kept[len(prompt) :]


def pair_loss(name: str, scores: tuple[Tensor, ...], args: Any) -> Tensor:
    """`(B,)` of the log-probs of chosen and rejected, of policy and reference."""
    chosen, rejected, ref_chosen, ref_rejected = scores
    c, r, beta, e = chosen - ref_chosen, rejected - ref_rejected, args.beta, args.label_smoothing
    bend = logsigmoid if "js" in str(args.f_divergence_type).lower() else lambda ratio: ratio
    gap = bend(c) - bend(r)
    x = beta * gap

    def smoothed(logits: Tensor) -> Tensor:
        return (1 - e) * softplus(-logits) + e * softplus(logits)

    if name == "aot":
        return smoothed(
            beta * ((chosen - rejected).sort().values - (ref_chosen - ref_rejected).sort().values)
        )
    if name == "aot_pair":
        return smoothed(beta * (c.sort().values - r.sort().values))
    modulation, delta = torch.sigmoid(x / args.discopop_tau), beta * torch.cat([c, r]).mean().detach()
    exo = e or 1e-3
    return {
        "sigmoid": smoothed(x),
        "hinge": relu(1 - x),
        "ipo": (gap - 1 / (2 * beta)) ** 2,
        "exo_pair": x.sigmoid() * (logsigmoid(x) - math.log(1 - exo))
        + (-x).sigmoid() * (logsigmoid(-x) - math.log(exo)),
        "nca_pair": -logsigmoid(beta * c) - 0.5 * logsigmoid(-beta * c) - 0.5 * logsigmoid(-beta * r),
        "robust": (-(1 - e) * logsigmoid(x) + e * logsigmoid(-x)) / (1 - 2 * e),
        "bco_pair": -logsigmoid(beta * c - delta) - logsigmoid(delta - beta * r),
        "sppo_hard": (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2,
        "apo_zero": 1 - (beta * c).sigmoid() + (beta * r).sigmoid(),
        "apo_down": (beta * c).sigmoid() + 1 - (beta * (c - r)).sigmoid(),
        "discopop": -(1 - modulation) * logsigmoid(x) + modulation * torch.exp(-x),
        "sft": 0 * x,
    }[name]


def dpo_loss(policy: Any, reference: Any, rows: list[dict[str, Any]], args: Any) -> Tensor:
    """The loss of a whole step, one sequence at a time."""
    sides = [[cut(row, side, args) for row in rows] for side in ("chosen", "rejected")]
    own, theirs = ([[token_logps(model, *ids) for ids in side] for side in sides] for model in (policy, reference))  # fmt: skip

    def total(logps: Tensor, other: Tensor) -> Tensor:
        weights = torch.full_like(logps, 1.0 if args.ld_alpha is None else args.ld_alpha)
        weights[: len(other)] = 1.0
        found = (weights * logps).sum()
        return found / len(logps) if "ipo" in args.loss_type else found

    scores = tuple(
        torch.stack([total(*both) for both in zip(ours, other, strict=True)])
        for chosen, rejected in (own, [[logps.detach() for logps in side] for side in theirs])
        for ours, other in ((chosen, rejected), (rejected, chosen))
    )
    weights = args.loss_weights or [1.0] * len(args.loss_type)
    loss = sum(w * pair_loss(name, scores, args).mean() for name, w in zip(args.loss_type, weights, strict=True))  # fmt: skip
    likelihood = sum(w for name, w in zip(args.loss_type, weights, strict=True) if name == "sft")
    return loss - (likelihood + (args.rpo_alpha or 0)) * torch.cat(own[0]).mean()


@pytest.mark.parametrize("name", DPO_LOSSES)
def test_a_step_of_dpo_is_what_the_formulas_say(name, monkeypatch):
    draws = random.Random(name)
    on_margin = name in ("sigmoid", "hinge", "ipo", "exo_pair", "robust", "discopop")
    losses = [
        name,
        *draws.sample(
            [other for other in DPO_LOSSES if other != name], draws.choice([0, 0, 1]) or name == "sft"
        ),
    ]
    settings = {
        "loss_type": losses, "beta": draws.choice([0.1, 0.5]), "rpo_alpha": draws.choice([None, 0.7]),
        "ld_alpha": draws.choice([None, 0.2, 0.6]), "max_length": draws.choice([None, 6, 11]), "max_prompt_length": None,
        "truncation_mode": draws.choice(["keep_end", "keep_start"]), **layout(draws, monkeypatch),
    }  # fmt: skip
    if len(losses) > 1:
        settings["loss_weights"] = [0.6, 1.7]
    if name in ("sigmoid", "robust", "exo_pair", "aot", "aot_pair"):
        settings["label_smoothing"] = draws.choice([0.0, 0.2])
    if on_margin and len(losses) == 1 and draws.random() < 0.5:
        settings["f_divergence_type"] = "js_divergence"
    rows, architecture = pairs(draws), draws.choice(ARCHITECTURES)
    (policy, reference), (other, _) = (dpo_runs.policy_and_reference(architecture) for _ in range(2))
    trainer = dpo_runs.make(
        model=policy, ref_model=reference, train_dataset=Dataset.from_list(rows), **settings
    )
    kept = [row for row in rows if all(cut(row, side, trainer.args)[1] for side in ("chosen", "rejected"))]
    gradient, log = kto_runs.step(trainer)
    loss = dpo_loss(other, dpo_runs.policy_and_reference(architecture)[1], kept, trainer.args)
    assert_same_gradient(gradient, plain_gradient(other, loss), 1e-9)
    assert log["loss"] == pytest.approx(loss.item(), rel=1e-6)


# ---- KTO and reward models


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_a_step_of_kto_is_what_the_formulas_say(loss_type, monkeypatch):
    draws = random.Random(loss_type)
    settings = {
        "loss_type": loss_type,
        "beta": 0.4,
        "desirable_weight": 1.3,
        "undesirable_weight": 0.6,
        "max_length": None,
    }
    rows = [
        {"prompt_input_ids": row["prompt_input_ids"], "completion_input_ids": row["chosen_input_ids"], "label": index % 3 == 0}
        for index, row in enumerate(pairs(draws))
    ]  # fmt: skip
    architecture = draws.choice(ARCHITECTURES)
    (policy, reference), (other, same) = (dpo_runs.policy_and_reference(architecture) for _ in range(2))
    trainer = kto_runs.make(
        model=policy, ref_model=reference, train_dataset=Dataset.from_list(rows), **settings,
        max_prompt_length=None, **layout(draws, monkeypatch),
    )  # fmt: skip
    gradient, _ = kto_runs.step(trainer)
    desirable = torch.tensor([row["label"] for row in rows])
    ratios = kto_runs.log_ratios(other, same, rows)
    kl = kto_runs.log_ratios(other, same, rows, shift=1).mean().clamp(min=0).detach() * (loss_type == "kto")
    x = 0.4 * (ratios - kl)
    loss = torch.where(desirable, 1.3 * (1 - x.sigmoid()), 0.6 * (1 - (-x).sigmoid())).mean()
    assert_same_gradient(gradient, plain_gradient(other, loss), 1e-9)


@pytest.mark.parametrize("seed", range(2))
def test_a_step_of_a_reward_model_is_what_the_formulas_say(seed, monkeypatch):
    draws = random.Random(seed)
    rows: list[dict[str, Any]] = [
        {
            f"{side}_input_ids": draws.choice([row["prompt_input_ids"], []]) + row[f"{side}_input_ids"]
            for side in ("chosen", "rejected")
        }
        | {"margin": draws.choice([0.0, 0.25, 1.0])}
        for row in pairs(draws)
    ]
    architecture, centering = draws.choice(ARCHITECTURES), draws.choice([None, 0.1])
    trainer = reward_runs.make(
        model=reward_runs.reward_model(architecture), train_dataset=Dataset.from_list(rows),
        center_rewards_coefficient=centering, **layout(draws, monkeypatch),
    )  # fmt: skip
    gradient, log = kto_runs.step(trainer)
    other = reward_runs.reward_model(architecture)

    def rewards(side: str) -> Tensor:
        each = [torch.tensor([row[f"{side}_input_ids"]]) for row in rows]
        return torch.stack([other.score(other.base_model(input_ids=ids)[0][0, -1])[0] for ids in each])

    chosen, rejected = rewards("chosen"), rewards("rejected")
    margins = torch.tensor([row["margin"] for row in rows])
    loss = (-logsigmoid(chosen - rejected - margins) + (centering or 0) * (chosen + rejected) ** 2).mean()
    assert_same_gradient(gradient, plain_gradient(other, loss), 1e-9)
    assert log["mean_reward"] == pytest.approx(torch.cat([chosen, rejected]).mean().item(), abs=1e-9)
