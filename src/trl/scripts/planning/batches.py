"""A micro-batch of each method with rows of the greatest length, without data and tokenizer."""

import torch

from trl.collators.language_modelling import DataCollatorForLanguageModeling
from trl.collators.preference import PairCollator
from trl.collators.reward import RewardCollator
from trl.collators.unpaired import UnpairedCollator
from trl.data.preference_rows import SIDES
from trl.data.teacher_columns import TEACHER_IDS, TEACHER_LOGPS
from trl.methods.online import ROLLOUT
from trl.models.packed.layout import Inputs, scored_sequences
from trl.models.scoring.base import ScorerBase, shares_prefix
from trl.rollouts import experience as columns
from trl.rollouts.experience import Experience
from trl.scripts.planning.run import Run
from trl.tensors.ragged import Ragged

_TOKEN = 5  # any


def batch_of(run: Run, scorer: ScorerBase) -> Inputs:
    """Rows as the collator of the method makes them, all completion tokens trained."""
    shares = shares_prefix(scorer, getattr(run.args, "prefix_sharing", False))
    batch = _rollouts(run, shares) if run.samples else _rows(run, shares, packed=scorer.packed)
    if getattr(run.args, "teacher_model_server_url", None):
        shape = (len(scored_sequences(batch)), run.args.teacher_top_k)
        batch |= {TEACHER_IDS: torch.zeros(shape, dtype=torch.int64), TEACHER_LOGPS: torch.zeros(shape)}
    return batch


def _rows(run: Run, shares: bool, *, packed: bool) -> Inputs:
    rows, lengths = run.rows, run.lengths
    prompt, completion = ([_TOKEN] * length for length in lengths)
    if run.method == "reward":  # whole sequences that begin alike
        sides = {f"{side}_input_ids": [*prompt, number, *completion[1:]] for number, side in enumerate(SIDES)}
        return RewardCollator(prefix_sharing=shares, packed=packed)([sides] * rows)
    if run.method in ("dpo", "orpo", "cpo"):
        pair = {"prompt_input_ids": prompt, **{f"{side}_input_ids": completion for side in SIDES}}
        return {**PairCollator(shares)([pair] * rows), "ref_logps": torch.zeros(2 * rows)}
    if run.method in ("kto", "bco"):
        single = {"prompt_input_ids": prompt, "completion_input_ids": completion}
        labelled = [{**single, "label": number % 2 == 0} for number in range(rows)]
        return {**UnpairedCollator(shares)(labelled), "ref_logps": torch.zeros(rows)}
    mask = [int(getattr(run.args, "lmbda", 0.0) < 1)] * lengths.prompt + [1] * lengths.completion
    row = {"input_ids": prompt + completion, "completion_mask": mask}
    return DataCollatorForLanguageModeling(pad_token_id=0)([row] * rows)


def _rollouts(run: Run, shares: bool) -> Inputs:
    """Completions of prompts, `num_generations` of each, with all columns that a loss may read."""
    rows, group, lengths = run.args.device_rows, run.args.num_generations or 1, run.lengths
    prompts = Ragged.of([[_TOKEN + place // group] * lengths.prompt for place in range(rows)])
    completions = Ragged.of([[_TOKEN] * lengths.completion] * rows)
    tokens, numbers = torch.zeros(rows * lengths.completion), torch.ones(rows)
    per_token = {columns.OLD: tokens, columns.TRAINED: tokens == 0}
    if getattr(run.args, "beta", 0):
        per_token[columns.REF] = tokens
    per_row = dict.fromkeys((columns.ADVANTAGE, columns.REWARD, columns.STOPPED), numbers)
    per_row |= {columns.SCORES: torch.arange(rows) / rows}
    per_row |= dict.fromkeys((columns.LENGTH, columns.MEAN_LENGTH), numbers * lengths.completion)
    experience = Experience(prompts, completions, per_token, per_row)
    return {**experience.as_batch(prefix_sharing=shares), ROLLOUT: experience}
