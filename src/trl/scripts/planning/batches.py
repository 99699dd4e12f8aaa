"""A micro-batch of each method with rows of the greatest length, without data and tokenizer."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trl.collators.language_modelling import DataCollatorForLanguageModeling
from trl.collators.preference import PairCollator
from trl.collators.unpaired import UnpairedCollator
from trl.methods.bco import BCOMethod
from trl.methods.cpo import CPOMethod
from trl.methods.dpo import DPOMethod
from trl.methods.grpo import GRPOMethod
from trl.methods.kto import KTOMethod
from trl.methods.method import Method
from trl.methods.online import ROLLOUT
from trl.methods.orpo import ORPOMethod
from trl.methods.rloo import RLOOMethod
from trl.methods.sft import SFTMethod
from trl.models.packed.layout import Inputs
from trl.models.scoring.base import shares_prefix
from trl.models.scoring.causal import Scorer
from trl.rollouts.experience import ADVANTAGE, LENGTH, MEAN_LENGTH, OLD, REF, REWARD, SCORES, TRAINED, Experience
from trl.tensors.ragged import Ragged

if TYPE_CHECKING:
    from trl.scripts.arguments import AnyConfig

_TOKEN = 5  # any
_LENGTH = 1024  # of a row without a limit


class Lengths(NamedTuple):
    """Tokens of a prompt and of a completion, of a row together."""

    prompt: int
    completion: int

    @property
    def row(self) -> int:
        """Tokens of prompt and completion."""
        return self.prompt + self.completion


def lengths_of(method: str, args: "AnyConfig", context: int | None) -> Lengths:
    """The greatest lengths that the options allow; half of a row is prompt where they leave it open."""
    prompt, completion = (getattr(args, f"max_{part}_length", None) for part in ("prompt", "completion"))
    if METHODS[method].samples:
        completion = completion or _LENGTH
        return Lengths(prompt or min(completion, max(1, (context or _LENGTH) - completion)), completion)
    row = getattr(args, "max_length", None) or min(_LENGTH, context or _LENGTH)
    prompt = min(prompt or row // 2, row // 2 if row > 1 else 1)
    return Lengths(prompt, row - prompt)


def text_batch(args: Any, rows: int, lengths: Lengths, scorer: Scorer) -> Inputs:
    """Rows of tokens that are all trained."""
    collate = DataCollatorForLanguageModeling(pad_token_id=0)
    return collate([{"input_ids": [_TOKEN] * lengths.row}] * rows)


def _shares(args: Any, scorer: Scorer) -> bool:
    return shares_prefix(scorer, getattr(args, "prefix_sharing", False))


def pair_batch(args: Any, rows: int, lengths: Lengths, scorer: Scorer) -> Inputs:
    """Prompts with two completions, and the reference's log-probs."""
    row = {"prompt_input_ids": [_TOKEN] * lengths.prompt}
    row |= dict.fromkeys(("chosen_input_ids", "rejected_input_ids"), [_TOKEN] * lengths.completion)
    batch = PairCollator(_shares(args, scorer))([row] * rows)
    return {**batch, "ref_logps": torch.zeros(2 * rows)}


def single_batch(args: Any, rows: int, lengths: Lengths, scorer: Scorer) -> Inputs:
    """Prompts with a completion, half of them marked as good, and the reference's log-probs."""
    row = {"prompt_input_ids": [_TOKEN] * lengths.prompt, "completion_input_ids": [_TOKEN] * lengths.completion}
    batch = UnpairedCollator(_shares(args, scorer))([{**row, "label": number % 2 == 0} for number in range(rows)])
    return {**batch, "ref_logps": torch.zeros(rows)}


def rollout_batch(args: Any, rows: int, lengths: Lengths, scorer: Scorer) -> Inputs:
    """Completions of prompts, `num_generations` of each, with all columns that a loss may read."""
    group = max(1, args.num_generations or 1)
    prompts = Ragged.of([[_TOKEN + place // group] * lengths.prompt for place in range(rows)])
    tokens, numbers = torch.zeros(rows * lengths.completion), torch.ones(rows)
    per_token = {OLD: tokens, TRAINED: tokens == 0, **({REF: tokens} if getattr(args, "beta", 0) else {})}
    per_row: dict[str, torch.Tensor] = dict.fromkeys((ADVANTAGE, REWARD, SCORES), numbers)
    per_row |= dict.fromkeys((LENGTH, MEAN_LENGTH), numbers * lengths.completion)
    completions = Ragged.of([[_TOKEN] * lengths.completion] * rows)
    experience = Experience(prompts, completions, per_token, per_row)
    return {**experience.as_batch(prefix_sharing=_shares(args, scorer)), ROLLOUT: experience}


class Planned(NamedTuple):
    """What is known of a method: its mathematics, its micro-batch, whether it has a reference and samples."""

    method: Callable[[Any], Method]
    batch: Callable[[Any, int, Lengths, Scorer], Inputs] = text_batch
    has_reference: bool = False
    samples: bool = False


METHODS = {
    "sft": Planned(lambda args: SFTMethod(args.loss_type)),
    "dpo": Planned(DPOMethod, pair_batch, has_reference=True),
    "orpo": Planned(ORPOMethod, pair_batch),
    "cpo": Planned(CPOMethod, pair_batch),
    "kto": Planned(KTOMethod, single_batch, has_reference=True),
    "bco": Planned(partial(BCOMethod, density=None), single_batch, has_reference=True),
    "grpo": Planned(GRPOMethod, rollout_batch, has_reference=True, samples=True),
    "rloo": Planned(RLOOMethod, rollout_batch, has_reference=True, samples=True),
}
