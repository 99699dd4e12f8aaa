"""Methods that programs of 0.4-0.26 call on `DPOTrainer`, over the scoring and the objectives of today."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from trl.collators.preference import OWN_PROMPT, REFERENCE_COLUMNS, DPODataCollatorWithPadding
from trl.data.formats import Row, RowDict
from trl.data.preference import tokenize_preference_row
from trl.legacy.interface import RECORDED, REFERENCES, View, call_with, overrides, takes
from trl.legacy.pair_methods import (
    SIDES,
    LegacyPairs,
    LegacyReference,
    both_sides,
    build_tokenized_answer,
    concatenated_inputs,
    mean_chosen_nll,
    pairs_of,
    whole_sequences,
    with_losses,
)
from trl.methods.method import ALONE, Batch, Outcome
from trl.models.packed.layout import STEP_PART, scored_sequences
from trl.models.policy import make_scorer
from trl.models.scoring.causal import Scored, mean_logits
from trl.models.scoring.head import ScoreOptions
from trl.objectives.pairs import PairScores, pair_metrics
from trl.objectives.preference import PAIR_LOSSES, nll_coefficient, preference_terms
from trl.options.checks import lookup
from trl.tensors.reduce import LossTerms
from trl.tensors.sequences import split_pairs, tokens_by_sequence

PairLosses = tuple[Tensor, Tensor, Tensor]
_OLDER_LOGPS = ("policy_chosen_logps", "policy_rejected_logps", "reference_chosen_logps", "reference_rejected_logps")


class LegacyDPO(LegacyReference):
    """Attributes and methods of `DPOTrainer` at 0.4-0.26; training calls those that are overridden."""

    f_divergence_params = View(lambda trainer: {"alpha_divergence_coef": trainer.args.f_alpha_divergence_coef})
    is_vision_model = View("with_images")
    get_batch_metrics = LegacyPairs.get_batch_loss_metrics

    def recorded_columns(self, batch: Batch) -> RowDict:
        """Prompts and completions of a batch of pairs, the labels of whole sequences, and the reference's log-probs."""
        rows = pairs_of(batch)
        wholes = [whole_sequences(row, is_encoder_decoder="decoder_labels" in batch) for row in rows]
        labels = [{name: ids for name, ids in row.items() if name.endswith("_labels")} for row in wholes]
        parts = [{name: ids for name, ids in row.items() if name != OWN_PROMPT} for row in rows]
        padded_rows = [{**part, **label} for part, label in zip(parts, labels, strict=True)]
        columns = DPODataCollatorWithPadding(self.scorer.pad_token_id)(padded_rows)
        if "ref_logps" in batch:
            columns |= dict(zip(REFERENCE_COLUMNS, split_pairs(batch["ref_logps"]), strict=True))
        return columns

    def recorded_outcome(self, batch: RowDict, scored: Scored) -> Outcome:
        """The outcome with an overridden `dpo_loss`: a call for each `loss_type`, if it takes that, else a single one.

        Its own loss includes that of "sft".
        """
        scores, args = self.method.pair_scores(batch, scored), self.args
        if self.mode == "train" and batch.get(STEP_PART, ALONE).plan is None:
            self.method.count_rewards(scores, self.processes)
        output = self.model_output(scores.chosen, scores.rejected, scored)
        logps = scores.chosen, scores.rejected, scores.ref_chosen, scores.ref_rejected
        names, weights = args.loss_type, args.loss_weights or [1.0] * len(args.loss_type)
        if not takes(self.dpo_loss, "loss_type"):
            names, weights = names[:1], [1.0]
        sums: Any = (0.0, 0.0, 0.0)
        for name, weight in zip(names, weights, strict=True):
            parts = call_with(self.dpo_loss, *logps, loss_type=name, model_output=output)
            sums = [total + weight * part for total, part in zip(sums, parts, strict=True)]
        losses, *rewards = sums
        losses = losses * output.get("policy_weights", 1.0)
        metrics = pair_metrics(*rewards, chosen_logps=scores.chosen, rejected_logps=scores.rejected)
        terms = LossTerms(scores.chosen, torch.ones_like(scores.chosen), "pair", metrics)
        return self.method.outcome(with_losses(terms, losses), scores, scored, nll=args.rpo_alpha)

    def reference_logps(self, batch: Batch) -> Tensor:
        """The reference's log-probs `(2B,)`, perhaps those of an overridden method."""
        name = next((name for name in REFERENCES if overrides(self, name)), None)
        if name is None:
            return super().reference_logps(batch)
        exact = torch.float32 if self.args.device.type == "mps" else torch.float64
        sides = [side.to(self.args.device, exact) for side in getattr(self, name)(batch.get(RECORDED, batch))]
        logps = torch.stack(sides, dim=1).flatten()
        if self.method.per_token:  # it gives means
            logps = logps * tokens_by_sequence(scored_sequences(batch), len(logps))
        return logps

    def compute_ref_log_probs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probs `(B,)` of chosen and rejected completions under the reference (means where a loss takes means).

        Those of the rows are taken as they are. Raises: ValueError without a reference.
        """
        if self.reference is None:
            raise ValueError("reference_free=True leaves no reference. Set it to False, or give ref_model.")
        batch = self.take_batch(batch)
        logps = batch.get("ref_logps")
        if logps is None:
            logps = super().reference_logps(batch)
        return _per_token(self, logps, batch)

    compute_reference_log_probs = compute_ref_log_probs

    @staticmethod
    def concatenated_inputs(batch: Batch, padding_value: int = 0, **older: Any) -> RowDict:
        """Chosen and rejected of a padded batch below each other.

        From `prompt_*`, `chosen_*`, `rejected_*` columns (0.12-0.26): `prompt_input_ids`, `prompt_attention_mask`,
        `completion_input_ids` and `completion_attention_mask`, `(2B, T)`, and the images, twice. From whole sequences
        with `chosen_labels` (0.4-0.11): `concatenated_input_ids`, `..._attention_mask`, `..._labels`, by the `older`
        arguments. A batch of the trainer's own collator gives the names of both levels.
        """
        if "rows" in batch:  # the trainer's own, perhaps with the columns that it hands to overridden methods
            batch = {name: value for name, value in batch.items() if not name.startswith((*SIDES, "prompt_"))}
        wholes = {}
        if "chosen_labels" in batch or not any(name.startswith(SIDES) for name in batch):
            wholes = concatenated_inputs(batch, padding_value=padding_value, **older)
            if "chosen_labels" in batch:
                return wholes
            pairs = [{k: ids for k, ids in row.items() if k != OWN_PROMPT} for row in pairs_of(batch)]
            batch = DPODataCollatorWithPadding(pad_token_id=padding_value)(pairs)
        prompts = {
            name: torch.cat([value, value])
            for name, value in batch.items()
            if isinstance(value, Tensor) and not name.startswith((*SIDES, "ref_"))
        }
        fill = {"input_ids": padding_value, "attention_mask": 0}
        completions = {f"completion_{name}": both_sides(batch, name, value) for name, value in fill.items()}
        return {**wholes, **prompts, **completions}

    def concatenated_forward(self, model: nn.Module, batch: Batch, is_ref_model: bool = False) -> dict[str, Tensor]:
        """What `model`, the policy or the reference, makes of a batch of pairs, with gradient where there is one.

        `chosen_logps` and `rejected_logps` `(B,)` (means where a loss takes means), `mean_chosen_logits` and
        `mean_rejected_logits`, and where they apply `nll_loss`, `policy_weights` `(B,)`, `aux_loss`.
        """
        batch = self.take_batch(batch)
        options = ScoreOptions(collision=self.args.use_weighting and not is_ref_model, mean_logits=True)
        with self.accelerator.autocast():
            scored = _scorer_of(self, model).score(model, batch, options)
        return self.model_output(*_per_token(self, self.method.totals(batch, scored), batch), scored)

    def model_output(self, chosen: Tensor, rejected: Tensor, scored: Scored) -> dict[str, Tensor]:
        """The dict of `concatenated_forward` for log-probs `(B,)` of chosen and rejected completions."""
        args, output = self.args, {"chosen_logps": chosen, "rejected_logps": rejected}
        for name, value in mean_logits(scored).items():
            output[f"mean_{name.removeprefix('logits/')}_logits"] = value.mean
        if nll_coefficient(args.loss_type, args.loss_weights, args.rpo_alpha):
            output["nll_loss"] = mean_chosen_nll(scored)
        if scored.log_collision is not None:
            output["policy_weights"] = self.method.pair_weights(scored, len(chosen))
        if scored.aux_loss is not None:
            output["aux_loss"] = scored.aux_loss
        return output

    def dpo_loss(
        self, chosen_logps: Tensor | None = None, rejected_logps: Tensor | None = None,
        ref_chosen_logps: Tensor | None = None, ref_rejected_logps: Tensor | None = None,
        loss_type: str | bool = "sigmoid", model_output: Mapping[str, Tensor] | None = None, *,
        reference_free: bool = False, **older: Tensor,
    ) -> PairLosses:  # fmt: skip
        """Losses and rewards of chosen and rejected, `(B,)` each, from log-probs `(B,)` of policy and reference.

        Settings other than `loss_type` are the trainer's; `sft` needs `model_output["nll_loss"]`. With the names of
        0.4-0.11 (`policy_chosen_logps`, ..., `reference_free`, which was the fifth argument) the loss is the trainer's
        own, mixed as in training. Raises: ValueError for an unknown loss, TypeError for missing arguments.
        """
        newer = [chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps]
        logps = [older.pop(name, value) for name, value in zip(_OLDER_LOGPS, newer, strict=True)]
        is_legacy = isinstance(loss_type, bool) or newer[0] is None
        if older or any(value is None for value in logps):
            count = f"{sum(value is not None for value in logps)}{f' and {sorted(older)}' if older else ''}"
            four = "four tensors of log-probs (chosen and rejected, of policy and reference)"
            raise TypeError(f"dpo_loss takes {four}, got {count}. Give all four.")
        scores = PairScores(*cast(tuple[Tensor, Tensor, Tensor, Tensor], tuple(logps)))
        free = loss_type if isinstance(loss_type, bool) else reference_free or self.args.reference_free
        rewards = [self.args.beta * ratio.detach() for ratio in scores.ratios]
        if free:
            scores = PairScores.without_reference(scores.chosen, scores.rejected)
        names = self.args.loss_type if is_legacy else [cast(str, loss_type)]
        losses = [lookup(PAIR_LOSSES, name, "loss_type") for name in names]
        if names == ["sft"]:
            if model_output is None:
                raise TypeError("loss_type 'sft' needs model_output, got None. Give what concatenated_forward returns.")
            return model_output["nll_loss"].expand(len(scores.chosen)), rewards[0], rewards[1]
        if any(loss.needs_step for loss in losses):
            scores = replace(scores, step=self.method.statistics(scores))
        weights = self.args.loss_weights if is_legacy else None
        terms = preference_terms(scores, names, self.args.pair_options(), loss_weights=weights)
        return terms.values, rewards[0], rewards[1]

    tokenize_row = staticmethod(tokenize_preference_row)
    build_tokenized_answer = build_tokenized_answer

    @staticmethod
    def process_row(
        features: Row, processing_class: Any, max_prompt_length: int | None = None,
        max_completion_length: int | None = None, add_special_tokens: bool = True,
    ) -> RowDict:  # fmt: skip
        """`tokenize_row` for a row with `images`: the prompt goes through the processor."""
        options = None, max_completion_length, add_special_tokens
        row: RowDict = dict(tokenize_preference_row(features, processing_class, *options))
        text, images = features["prompt"], features.get("images")
        inputs = dict(processing_class(images=images, text=text, add_special_tokens=False))
        plain = processing_class.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = row["prompt_input_ids"]  # the plain ones between special tokens
        starts = range(len(ids) - len(plain) + 1)
        before = next((start for start in starts if ids[start : start + len(plain)] == plain), 0)
        image_ids = [int(token) for token in inputs.pop("input_ids")[0]]
        prompt = [*ids[:before], *image_ids, *ids[before + len(plain) :]]
        inputs.pop("attention_mask", None)
        row["prompt_input_ids"] = prompt if max_prompt_length is None else prompt[-max_prompt_length:]
        return {**row, **{name: value[0] for name, value in inputs.items()}}

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Called with `(model, batch)`: `generate_from_model_and_ref`, as programs of 0.4-0.11 mean it.

        Otherwise, with `(epoch_iterator, num_batches, device)`: transformers' hook, the micro-batches of a step.
        """
        is_legacy = "batch" in kwargs or (len(args) == 2 and isinstance(args[1], Mapping))
        if is_legacy:
            return self.generate_from_model_and_ref(*args, **kwargs)
        return super().get_batch_samples(*args, **kwargs)


def _per_token(trainer: LegacyDPO, logps: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Chosen and rejected of sums `(2B,)`, as means over tokens where one of the trainer's losses takes means."""
    if trainer.method.per_token:
        logps = logps / tokens_by_sequence(scored_sequences(batch), len(logps))
    return split_pairs(logps)


def _scorer_of(trainer: LegacyDPO, model: nn.Module) -> Any:
    """The scoring forward that belongs to a model: the policy's, the reference's, or one of its own."""
    modules = set(model.modules())
    for scorer in (trainer.scorer, getattr(trainer.reference, "scorer", None)):
        if scorer is not None and scorer.core in modules:
            return scorer
    return make_scorer(model, trainer._tokenizer)
