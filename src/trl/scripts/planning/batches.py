"""A micro-batch of each method with rows of the greatest length, without data and tokenizer."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from trl.collators.language_modelling import DataCollatorForLanguageModeling
from trl.collators.preference import PairCollator
from trl.collators.reward import RewardCollator
from trl.collators.unpaired import UnpairedCollator
from trl.methods.nash_md import OPPONENT_SCORE, OPPONENT_STOPPED, PREFERENCE
from trl.methods.online import ROLLOUT, OnlineMethod
from trl.methods.online_dpo import OnlineDPOMethod
from trl.models.packed.layout import IGNORED, Inputs
from trl.models.scoring.base import shares_prefix
from trl.models.setup import REWARD_MODEL, STEP_CLASSIFIER, ClassifierKind
from trl.rollouts import experience as columns
from trl.rollouts.experience import Experience
from trl.scripts.training import COMMANDS
from trl.tensors.ragged import Ragged

if TYPE_CHECKING:
    from trl.scripts.arguments import AnyConfig

_TOKEN = 5  # any
_LENGTH = 1024  # of a row without a limit
_STEP = 16  # tokens of a step of a solution


class Lengths(NamedTuple):
    """Tokens of a prompt and of a completion, of a row together."""

    prompt: int
    completion: int

    @property
    def row(self) -> int:
        """Tokens of prompt and completion."""
        return self.prompt + self.completion


def lengths_of(args: "AnyConfig", context: int | None, *, samples: bool) -> Lengths:
    """The greatest lengths that the options allow; half of a row is prompt where they leave it open."""
    prompt, completion = (getattr(args, f"max_{part}_length", None) for part in ("prompt", "completion"))
    if samples:
        completion = completion or _LENGTH
        return Lengths(prompt or min(completion, max(1, (context or _LENGTH) - completion)), completion)
    row = getattr(args, "max_length", None) or min(_LENGTH, context or _LENGTH)
    longest = max(1, row - getattr(args, "max_new_tokens", row // 2))
    prompt = min(prompt or longest, longest)
    return Lengths(prompt, max(1, row - prompt))


def text_batch(args: Any, rows: int, lengths: Lengths, scorer: Any) -> Inputs:
    """Rows of tokens that are all trained, or only completions where the policy writes them all."""
    mask = [int(getattr(args, "lmbda", 0.0) < 1)] * lengths.prompt + [1] * lengths.completion
    row = {"input_ids": [_TOKEN] * lengths.row, "completion_mask": mask}
    return DataCollatorForLanguageModeling(pad_token_id=0)([row] * rows)


def step_batch(args: Any, rows: int, lengths: Lengths, scorer: Any) -> Inputs:
    """Rows with a label at the end of each step."""
    batch = text_batch(args, rows, lengths, scorer)
    at_end = (torch.arange(lengths.row) + 1) % _STEP == 0
    at_end[-1] = True
    return {**batch, "labels": torch.where(at_end, 1, IGNORED).expand(rows, -1).clone()}


def scored_batch(args: Any, rows: int, lengths: Lengths, scorer: Any) -> Inputs:
    """Pairs of whole sequences that begin alike."""
    prompt, completion = [_TOKEN] * lengths.prompt, [_TOKEN] * (lengths.completion - 1)
    row = {f"{side}_input_ids": [*prompt, number, *completion] for number, side in enumerate(("chosen", "rejected"))}
    return RewardCollator(prefix_sharing=_shares(args, scorer), packed=scorer.packed)([row] * rows)


def _shares(args: Any, scorer: Any) -> bool:
    return shares_prefix(scorer, getattr(args, "prefix_sharing", False))


def pair_batch(args: Any, rows: int, lengths: Lengths, scorer: Any) -> Inputs:
    """Prompts with two completions, and the reference's log-probs."""
    row = {"prompt_input_ids": [_TOKEN] * lengths.prompt}
    row |= dict.fromkeys(("chosen_input_ids", "rejected_input_ids"), [_TOKEN] * lengths.completion)
    batch = PairCollator(_shares(args, scorer))([row] * rows)
    return {**batch, "ref_logps": torch.zeros(2 * rows)}


def single_batch(args: Any, rows: int, lengths: Lengths, scorer: Any) -> Inputs:
    """Prompts with a completion, half of them marked as good, and the reference's log-probs."""
    row = {"prompt_input_ids": [_TOKEN] * lengths.prompt, "completion_input_ids": [_TOKEN] * lengths.completion}
    batch = UnpairedCollator(_shares(args, scorer))([{**row, "label": number % 2 == 0} for number in range(rows)])
    return {**batch, "ref_logps": torch.zeros(rows)}


def rollout_batch(args: Any, rows: int, lengths: Lengths, scorer: Any, *, trained: int = 1) -> Inputs:
    """Completions of prompts with all columns that a loss may read: every `trained`-th of `num_generations` of each."""
    rows, group = args.device_rows // trained or 1, max(1, (args.num_generations or 1) // trained)
    prompts = Ragged.of([[_TOKEN + place // group] * lengths.prompt for place in range(rows)])
    tokens, numbers = torch.zeros(rows * lengths.completion), torch.ones(rows)
    per_token = {columns.OLD: tokens, columns.TRAINED: tokens == 0}
    if getattr(args, "beta", 0):
        per_token[columns.REF] = tokens
    names = (columns.ADVANTAGE, columns.REWARD, columns.STOPPED, PREFERENCE, OPPONENT_SCORE, OPPONENT_STOPPED)
    per_row: dict[str, Tensor] = {**dict.fromkeys(names, numbers), columns.SCORES: torch.arange(rows) / rows}
    per_row |= dict.fromkeys((columns.LENGTH, columns.MEAN_LENGTH), numbers * lengths.completion)
    if trained > 1:  # as Nash-MD's penalties make them
        per_token[columns.ADVANTAGE] = tokens
    completions = Ragged.of([[_TOKEN] * lengths.completion] * rows)
    experience = Experience(prompts, completions, per_token, per_row)
    return {**experience.as_batch(prefix_sharing=_shares(args, scorer)), ROLLOUT: experience}


class Planned(NamedTuple):
    """What is known of a method: its mathematics, its micro-batch, and its kind of classifier."""

    method: Any
    batch: Callable[[Any, int, Lengths, Any], Inputs]
    classifier: ClassifierKind | None
    opponents: int  # models that together generate every second completion; 0: the policy generates all

    @property
    def samples(self) -> bool:
        """Whether it learns from the policy's completions alone."""
        return isinstance(self.method, OnlineMethod)

    @property
    def has_reference(self) -> bool:
        """Whether it needs the log-probs of a reference."""
        return self.method.scores_reference if self.samples else bool(self.method.reference_names)


_BATCHES = {
    "reward": scored_batch, "prm": step_batch,
    **dict.fromkeys(("dpo", "orpo", "cpo"), pair_batch), **dict.fromkeys(("kto", "bco"), single_batch),
    "nash-md": partial(rollout_batch, trained=2),  # the opponent's completions are not trained on
}  # fmt: skip
_CLASSIFIERS = {"reward": REWARD_MODEL, "prm": STEP_CLASSIFIER}
_OPPONENTS = {"xpo": 1, "nash-md": 2}


def planned_of(name: str, args: "AnyConfig") -> Planned:
    """That of the method of a training command."""
    module = import_module(f"trl.methods.{name.replace('-', '_')}")
    kind = getattr(module, f"{COMMANDS[name].prefix}Method")
    arguments = {"sft": (getattr(args, "loss_type", None),), "prm": ()}.get(name, (args,))
    method = kind(*arguments, density=None) if name == "bco" else kind(*arguments)
    if isinstance(method, OnlineDPOMethod):
        method.epoch = lambda: 0.0
    usual = rollout_batch if isinstance(method, OnlineMethod) else text_batch
    return Planned(method, _BATCHES.get(name, usual), _CLASSIFIERS.get(name), _OPPONENTS.get(name, 0))
