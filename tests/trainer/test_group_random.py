"""GRPO, its relatives and RLOO under settings drawn at random, against the formulas over a model's own logits.

What all layouts have in common shows only here. float64; gradients agree to 1e-9 of the largest, divergences to 1e-9.
"""

import random
from typing import Any

import pytest
import torch

from tests.tiny import tiny_model
from tests.trainer import group_plain
from tests.trainer.grpo_runs import even_tokens, logs, make
from trl.models.scoring import base as scorer_base
from trl.objectives.group_policy import LOSS_TYPES
from trl.objectives.group_ratios import RATIOS
from trl.tensors import heads
from trl.trainer.online_trainer import OnlineTrainer

ARCHITECTURES = ("gpt2", "opt", "gpt_neox")  # nothing of theirs is rounded to float32 on the way
METHODS = (*LOSS_TYPES, "rloo")


def settings_of(method: str, draws: random.Random) -> dict[str, Any]:
    accumulated, windows = draws.choice([1, 2]), draws.choice([1, 2])
    found = {
        "gradient_accumulation_steps": accumulated, "steps_per_generation": accumulated * windows, "num_iterations": 2,
        "per_device_train_batch_size": draws.choice([2, 4]), "num_generations": draws.choice([2, 4]), "max_steps": 4,
        "learning_rate": 0.001 if method in ("rloo", "luspo") else 0.005, "max_completion_length": 7,
        "beta": draws.choice([0.02, 0.1]), "temperature": draws.choice([1.0, 0.7, 1.5]),
        "mask_truncated_completions": draws.random() < 0.5, "prefix_sharing": draws.choice(["auto", False]),
        "gradient_checkpointing": draws.random() < 0.3,
    }  # fmt: skip
    if accumulated * windows * found["per_device_train_batch_size"] % found["num_generations"]:
        found["num_generations"] = 2
    if method == "cispo":
        found["epsilon_high"] = 1.1
    elif method not in ("sapo", "vespo"):
        found |= {"epsilon": 0.1, "epsilon_high": draws.choice([None, 0.3])}
    if method == "rloo":
        return {"method": method, **found}
    levels = {"luspo": ["sequence", "sequence_token"], "vespo": ["token"]}.get(method, list(RATIOS))
    found |= {
        "loss_type": method, "importance_sampling_level": draws.choice(levels),
        "scale_rewards": draws.choice(["group", "batch", "none"]), "use_bias_correction_kl": draws.random() < 0.5,
    }  # fmt: skip
    if method not in ("cispo", "sapo", "vespo"):
        found["delta"] = draws.choice([None, 1.4])
    return found


def rollouts(draws: random.Random, group: int) -> Any:
    """Prompts of 1 to 9 tokens; completions of one token, of the greatest length, equal ones, and such with one beginning."""

    def completions(prompts, trainer):
        longest, found = trainer.args.max_completion_length, {"prompt_ids": [], "completion_ids": []}
        for number in range(len(prompts)):
            if number % group == 0:
                prompt, kind = ids(draws.choice([1, 2, 9])), draws.choice(["free", "beginning", "equal"])
                common = ids(longest)
            own = ids(draws.choice([1, 2, longest, draws.randint(1, longest)]))
            shared = len(own) // 2 if kind == "beginning" else 0
            own = common[:3] if kind == "equal" else common[:shared] + own[shared:]
            own[-1] = trainer.processing_class.eos_token_id if draws.random() < 0.6 else own[-1]
            found["prompt_ids"].append(prompt)
            found["completion_ids"].append(own)
        return found

    def ids(count: int) -> list[int]:
        return [draws.randrange(60) for _ in range(count)]

    return completions


def layout(draws: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded rows, chunks of the head, and when its gradient is taken."""
    if draws.random() < 0.3:
        monkeypatch.setattr(scorer_base, "packed_unsupported", lambda core: "this test wants padded rows")
    size = draws.choice([1, 3, 512])
    monkeypatch.setattr(heads, "default_chunk_size", lambda *args, **kwargs: size)
    if draws.random() < 0.3:
        monkeypatch.setattr(OnlineTrainer, "token_losses", lambda self, experience: None)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_is_what_the_formulas_say(method, monkeypatch):
    draws = random.Random(method)
    settings, architecture = settings_of(method, draws), draws.choice(ARCHITECTURES)
    layout(draws, monkeypatch)
    given = {"rollout_func": rollouts(draws, settings["num_generations"])}
    trainer, keep = make(architecture=architecture, given=given, **settings)
    model = tiny_model(architecture, dtype=torch.float64, attn_implementation="sdpa")
    plain, expected = group_plain.Run(model, trainer.args, even_tokens), []
    make_rollout_batch, rows_of_step = trainer.make_rollout_batch, trainer.rows_of_step

    def window(number):
        found = make_rollout_batch(number)
        prompts, completions = (
            [row.tolist() for row in part.split()] for part in (found.prompts, found.completions)
        )
        ends = trainer.processing_class.eos_token_id, *(trainer.sampling.stop_token_ids or ())
        plain.take(prompts, completions, [row[-1] in ends for row in completions])
        return found

    def rows(step):
        found = rows_of_step(step)
        expected.append(plain.step(torch.cat(found).tolist()))
        return found

    monkeypatch.setattr(trainer, "make_rollout_batch", window)
    monkeypatch.setattr(trainer, "rows_of_step", rows)
    trainer.train()
    for found, log, (gradient, kl) in zip(keep.steps, logs(trainer), expected, strict=True):
        size = max(float(value.abs().max()) for value in gradient.values())
        for name, value in gradient.items():
            assert (found[name] - value).abs().max() <= 1e-9 * max(size, 1e-3), name
        if kl is not None:
            assert log["kl"] == pytest.approx(kl, abs=1e-9)
    assert any(value.abs().max() > 1e-4 for gradient, _ in expected for value in gradient.values())
