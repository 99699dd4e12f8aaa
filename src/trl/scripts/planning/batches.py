"""A micro-batch of each method with rows of the greatest length, without data and tokenizer."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from trl.collators.language_modelling import DataCollatorForLanguageModeling
from trl.collators.preference import PairCollator
from trl.collators.reward import RewardCollator
from trl.collators.unpaired import UnpairedCollator
from trl.data.preference_rows import SIDES
from trl.methods.online import ROLLOUT
from trl.models.packed.layout import Inputs
from trl.models.scoring.base import ScorerBase, shares_prefix
from trl.rollouts import experience as columns
from trl.rollouts.experience import Experience
from trl.tensors.ragged import Ragged

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


def lengths_of(args: Any, context: int | None, *, samples: bool) -> Lengths:
    """The greatest lengths that the options allow; half of a row is prompt where they leave it open."""
    prompt, completion = (getattr(args, f"max_{part}_length", None) for part in ("prompt", "completion"))
    if samples:
        completion = completion or _LENGTH
        return Lengths(prompt or min(completion, max(1, (context or _LENGTH) - completion)), completion)
    row = getattr(args, "max_length", None) or min(_LENGTH, context or _LENGTH)
    longest = max(1, row - getattr(args, "max_new_tokens", row // 2))
    prompt = min(prompt or longest, longest)
    return Lengths(prompt, max(1, row - prompt))


def row_batch(name: str, args: Any, lengths: Lengths, scorer: ScorerBase) -> Inputs:
    """Rows as the collator of a method makes them of data, all tokens trained unless the policy writes completions."""
    rows, shares = args.per_device_train_batch_size, shares_prefix(scorer, getattr(args, "prefix_sharing", False))
    prompt, completion = ([_TOKEN] * length for length in lengths)
    if name == "reward":  # whole sequences that begin alike
        sides = {f"{side}_input_ids": [*prompt, number, *completion[1:]] for number, side in enumerate(SIDES)}
        return RewardCollator(prefix_sharing=shares, packed=scorer.packed)([sides] * rows)
    if name in ("dpo", "orpo", "cpo"):
        pair = {"prompt_input_ids": prompt, **{f"{side}_input_ids": completion for side in SIDES}}
        return {**PairCollator(shares)([pair] * rows), "ref_logps": torch.zeros(2 * rows)}
    if name in ("kto", "bco"):
        single = {"prompt_input_ids": prompt, "completion_input_ids": completion}
        labelled = [{**single, "label": number % 2 == 0} for number in range(rows)]
        return {**UnpairedCollator(shares)(labelled), "ref_logps": torch.zeros(rows)}
    mask = [int(getattr(args, "lmbda", 0.0) < 1)] * lengths.prompt + [1] * lengths.completion
    row = {"input_ids": prompt + completion, "completion_mask": mask}
    return DataCollatorForLanguageModeling(pad_token_id=0)([row] * rows)


def rollout_batch(args: Any, lengths: Lengths, scorer: ScorerBase) -> Inputs:
    """Completions of prompts with all columns that a loss may read: `num_generations` of each."""
    rows, group = args.device_rows, args.num_generations or 1
    prompts = Ragged.of([[_TOKEN + place // group] * lengths.prompt for place in range(rows)])
    tokens, numbers = torch.zeros(rows * lengths.completion), torch.ones(rows)
    per_token = {columns.OLD: tokens, columns.TRAINED: tokens == 0}
    if getattr(args, "beta", 0):
        per_token[columns.REF] = tokens
    names = (columns.ADVANTAGE, columns.REWARD, columns.STOPPED)
    per_row: dict[str, Tensor] = {**dict.fromkeys(names, numbers), columns.SCORES: torch.arange(rows) / rows}
    per_row |= dict.fromkeys((columns.LENGTH, columns.MEAN_LENGTH), numbers * lengths.completion)
    completions = Ragged.of([[_TOKEN] * lengths.completion] * rows)
    experience = Experience(prompts, completions, per_token, per_row)
    shares = shares_prefix(scorer, getattr(args, "prefix_sharing", False))
    return {**experience.as_batch(prefix_sharing=shares), ROLLOUT: experience}
