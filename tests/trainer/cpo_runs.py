"""CPO and ORPO on the eight fixed pairs of `dpo_runs`, and their log-probs from plain calls of the model."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset
from tokenizers import pre_tokenizers

from tests.tiny import tiny_model
from tests.trainer.dpo_runs import pairs
from tests.trainer.one_step import assert_same_gradient, plain_gradient, step, trainer_of
from tests.trainer.resume_worker import tokenizer
from trl.trainer.cpo_config import CPOConfig
from trl.trainer.cpo_trainer import CPOTrainer
from trl.trainer.orpo_config import ORPOConfig
from trl.trainer.orpo_trainer import ORPOTrainer

TEXT = [
    {"prompt": "w3 w4 w5", "chosen": " w6 w7", "rejected": " w8"},
    {"prompt": "w9 w10", "chosen": " w11", "rejected": " w12 w13 w14"},
]


def make(out: str | None = None, *, kinds: tuple[Any, Any] = (CPOTrainer, CPOConfig), **settings: Any) -> Any:
    """A trainer with `settings`, those of its config and its arguments by name, over the defaults."""
    if settings.get("model") is None and "model_init" not in settings:
        settings["model"] = tiny_model("gpt2", dtype=torch.float64)
    given = {"train_dataset": Dataset.from_list(pairs()), "processing_class": words()}
    return trainer_of(*kinds, out, settings, **given)


make_orpo = functools.partial(make, kinds=(ORPOTrainer, ORPOConfig))


def words() -> Any:
    """The tokenizer of the runs, which also splits text: every word is a token."""
    splitting = tokenizer()
    splitting.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return splitting


class Plain(NamedTuple):
    """Of each pair, with gradient: log-probs `(T,)` of the tokens of both completions and of the chosen one's prompt, and
    the mean logit at each position that predicts a completion's token."""

    chosen: list[torch.Tensor]
    rejected: list[torch.Tensor]
    prompt: list[torch.Tensor]
    chosen_logits: torch.Tensor
    rejected_logits: torch.Tensor

    def totals(self, *, per_token: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums or means over tokens, of chosen and rejected completions, `(B,)` each."""
        sides = [
            torch.stack([logps.mean() if per_token else logps.sum() for logps in side])
            for side in (self.chosen, self.rejected)
        ]
        return sides[0], sides[1]


def plain(model: Any, rows: list[dict[str, list[int]]]) -> Plain:
    """One call of the model per sequence: no batch, no padding, no shared prompt."""
    found: dict[str, list[torch.Tensor]] = {"chosen": [], "rejected": [], "prompt": []}
    logits: dict[str, list[torch.Tensor]] = {"chosen": [], "rejected": []}
    for row in rows:
        start = len(row["prompt_input_ids"]) - 1
        for side in ("chosen", "rejected"):
            ids = torch.tensor([row["prompt_input_ids"] + row[f"{side}_input_ids"]])
            raw = model(input_ids=ids).logits[0, :-1]
            logps = raw.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            found[side].append(logps[start:])
            logits[side].append(raw[start:].mean(-1).detach())
            if side == "chosen":
                found["prompt"].append(logps[:start])
    return Plain(**found, **{f"{side}_logits": torch.cat(values) for side, values in logits.items()})


OF_THE_RUN = {"grad_norm", "learning_rate", "num_tokens", "epoch", "step"}


def assert_step(
    make_trainer: Any, formula: Callable, settings: dict[str, Any], names: set[str], expected: Any = None
) -> None:
    """A trainer's step is the formula's (or the `expected` one), and logs `names`."""
    gradients, log = step(make_trainer(**settings))
    if expected is None:
        model = tiny_model("gpt2", dtype=torch.float64)
        loss, metrics = formula(plain(model, pairs()), **settings)
        expected = plain_gradient(model, loss), {"loss": loss.item(), **metrics}
    assert_same_gradient(gradients, expected[0])
    assert log.keys() == names | OF_THE_RUN
    for name in names - {"loss"}:
        assert log[name] == pytest.approx(expected[1][name], rel=1e-12, abs=1e-12), name
    assert log["loss"] == pytest.approx(expected[1]["loss"], rel=1e-6)  # summed in float32 by transformers
