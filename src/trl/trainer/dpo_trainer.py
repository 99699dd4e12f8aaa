"""Direct preference optimisation and its family: learning from pairs against a reference policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
)

from trl._lazy import attach
from trl.collators.images import DataCollatorForVisionPreference
from trl.collators.preference import PAIR_COLUMNS, REFERENCE_COLUMNS, as_pair_batch
from trl.data.image_rows import has_images
from trl.data.preference import OWN_PROMPT
from trl.data.rendering import text_tokenizer
from trl.legacy.dpo_methods import LegacyDPOMethods
from trl.legacy.interface import GIVEN, REFERENCES
from trl.models.packed.layout import FILLS_UP, pair_units, row_count, scored_sequences
from trl.models.peft import is_peft_model
from trl.models.policy import Policy, make_scorer
from trl.models.reference import FrozenModel, Reference, choose_adapters, make_reference
from trl.models.scoring.base import shares_prefix
from trl.models.scoring.causal import Scored, mean_logits
from trl.models.scoring.head import ScoreOptions
from trl.objectives.pairs import PairScores, StepStatistics, step_statistics
from trl.objectives.preference import (
    PAIR_LOSSES,
    chosen_nll,
    nll_coefficient,
    preference_terms,
)
from trl.reporting.metrics import Processes, RunningMean
from trl.reporting.model_card import Paper
from trl.tensors.reduce import LossTerms, Unit, weighted
from trl.tensors.sequences import (
    alignment_by_sequence,
    length_desensitized,
    split_pairs,
    sum_by_sequence,
    tokens_by_sequence,
    wpo_weights,
)
from trl.trainer import images
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.method import Method, Outcome, Step
from trl.trainer.preference_trainer import PreferenceTrainer, pair_collator, pair_sets

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere

AnyDataset = Dataset | IterableDataset


class DPOMethod(Method):
    """The mathematics of DPO and its family, of pairs with the reference's log-probs in `ref_logps`."""

    units: ClassVar[tuple[Unit, ...]] = ("pair", "token")

    mean_reward: RunningMean

    def __init__(self, args: DPOConfig) -> None:
        self.args, self.mean_reward = args, RunningMean()
        self._nll_coefficient = nll_coefficient(args.loss_type, args.loss_weights, args.rpo_alpha)
        self._compares_pairs = any(PAIR_LOSSES[name].needs_step for name in args.loss_type)

    def options(self, *, statistics: bool) -> ScoreOptions:
        """With the logs of collision probabilities for WPO."""
        return ScoreOptions(collision=self.args.use_weighting, mean_logits=True)

    def count(self, batch: Mapping[str, Any]) -> Tensor:
        """How many pairs a batch has, and how many tokens their chosen completions."""
        return pair_units(batch)

    def prepare(self, batches: Sequence[Mapping[str, Any]], step: Step) -> Sequence[Any]:
        """Score a step of several micro-batches without gradient where a loss compares its pairs with each other."""
        if not self._compares_pairs or len(batches) == 1:
            return [None] * len(batches)
        found = []
        for batch in batches:
            step.add_reference(batch)
            found.append(self._compared(self.pair_scores(batch, step.score(batch))))
        return self._statistics(found, step.processes, batches[-1])

    def _statistics(
        self, found: Sequence[PairScores], processes: Processes, last: Mapping[str, Any] = {}
    ) -> list[StepStatistics]:
        """What each micro-batch must know of all pairs of the step, on all processes; counts their rewards."""
        columns = [[s.chosen, s.rejected, s.ref_chosen, s.ref_rejected] for s in found]
        own = torch.cat([torch.stack(column, dim=1).detach() for column in columns])
        table, first = processes.rows(own[: len(own) - (FILLS_UP in last)])
        chosen, rejected, ref_chosen, ref_rejected = table.unbind(dim=1)
        scores = PairScores(chosen, rejected, ref_chosen, ref_rejected)
        self.mean_reward.add(weighted(self.args.beta * torch.cat(scores.ratios)))
        statistics, parts = self.statistics(scores), []
        for part in found:
            first = min(first, len(table) - len(part.chosen))  # a batch that fills up is not in the table
            parts.append(statistics.rows(slice(first, first + len(part.chosen))))
            first += len(part.chosen)
        return parts

    def count_rewards(self, scores: PairScores, processes: Processes) -> None:
        """Let the rewards of pairs move the run's mean, where a loss takes that. All processes must call it."""
        if self._compares_pairs:
            self._statistics([self._compared(scores)], processes)

    def statistics(self, scores: PairScores) -> StepStatistics:
        """Statistics of pairs, with the mean reward of the run so far as delta (BCO, arXiv:2404.04656)."""
        found = step_statistics(scores, self.args.beta)
        if not self.mean_reward.count:
            return found
        return replace(found, delta=torch.full_like(found.delta, self.mean_reward.value))

    def pair_scores(self, batch: Mapping[str, Any], scored: Scored) -> PairScores:
        """Log-probs of policy and reference of a batch's pairs: sums, or means where the loss takes means."""
        policy = self.totals(batch, scored)
        reference = batch["ref_logps"].to(policy) if "ref_logps" in batch else torch.zeros_like(policy)
        scores = PairScores(*split_pairs(policy), *split_pairs(reference))
        if not any(PAIR_LOSSES[name].per_token for name in self.args.loss_type):
            return scores
        return scores.per_token(*split_pairs(tokens_by_sequence(scored.positions.sequence, len(policy))))

    def terms(self, batch: Mapping[str, Any], scored: Scored, step: Step) -> Outcome:
        """The losses of a batch's pairs, and the likelihood of their chosen completions where it is part of the
        loss.
        """
        logged = self.pair_scores(batch, scored)
        scores = self._compared(logged)
        if self._compares_pairs:
            known = step.context
            if known is None and step.training:
                known = self._statistics([scores], step.processes, batch)[0]
            elif known is None:
                known = self.statistics(scores)
            scores = replace(scores, step=known)
        terms = preference_terms(
            scores,
            self.args.loss_type,
            self.args.pair_options(),
            loss_weights=self.args.loss_weights,
            pair_weights=self.pair_weights(scored, len(logged.chosen)),
            logged=logged,
        )
        return self.outcome(terms, logged, scored, nll=self._nll_coefficient)

    def outcome(self, terms: LossTerms, logged: PairScores, scored: Scored, *, nll: float | None) -> Outcome:
        """Terms of pairs with the chosen completions' likelihood, weighted by `nll`; predictions are the rewards."""
        parts = [terms._replace(metrics={**terms.metrics, **mean_logits(scored)})]
        if nll:
            parts.append(chosen_nll(scored.logps, scored.positions.sequence % 2 == 0, coefficient=nll))
        rewards = self.args.beta * torch.stack(logged.ratios, dim=1)
        labels = torch.zeros(len(rewards), dtype=torch.int64, device=rewards.device)
        return Outcome(parts, rewards, labels, scored.aux_loss)

    def _compared(self, scores: PairScores) -> PairScores:
        """The scores that the loss sees: with `reference_free`, against a reference of 0."""
        if not self.args.reference_free:
            return scores
        return PairScores.without_reference(scores.chosen, scores.rejected)

    def totals(self, batch: Mapping[str, Any], scored: Scored) -> Tensor:
        """Log-prob of each completion `(2B,)`, those of tokens past the shorter one's length discounted by
        `ld_alpha`.
        """
        sequence, alpha, count = (
            scored.positions.sequence,
            self.args.ld_alpha,
            2 * row_count(batch, per_row=2),
        )
        if alpha is None:
            return sum_by_sequence(scored.logps, sequence, count)
        return length_desensitized(scored.logps, sequence, count, alpha=alpha)

    def pair_weights(self, scored: Scored, pairs: int) -> Tensor | None:
        """WPO's weights `(B,)`; None without `use_weighting`."""
        if not self.args.use_weighting:
            return None
        assert scored.log_collision is not None
        alignment = alignment_by_sequence(scored.logps, scored.log_collision, scored.positions.sequence, 2 * pairs)
        return wpo_weights(*split_pairs(alignment))


class DPOTrainer(LegacyDPOMethods, PreferenceTrainer):
    """Trainer of direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) and the losses that followed.

    Args:
        model: a causal language model or an encoder-decoder, a `PeftModel`, or a name or path.
        ref_model: the policy that the trained one is compared with: a model, a name or a path. None: the model as it is
            now (a frozen copy, or the base of an adapter).
        args: a `DPOConfig`; a plain `TrainingArguments` is taken over into one.
        data_collator: makes batches of tokenised pairs; by default `PairCollator`.
        train_dataset: preference rows (`chosen`, `rejected`, with or without `prompt`), standard or conversational.
        eval_dataset: the same, or a dict of several by name.
        processing_class: the tokenizer, or the processor of a vision-language model; by default the one saved with the
            model.
        compute_metrics: `EvalPrediction -> dict`; predictions `(N, 2)` are the rewards of chosen and rejected, labels
        0. peft_config: trains a new adapter with these settings instead of the model.

    The loss is the mean over all pairs of an optimiser step, of all its micro-batches on all processes.

    Example:
        >>> from datasets import load_dataset
        >>> trainer = DPOTrainer(
        ...     "Qwen/Qwen3-0.6B", train_dataset=load_dataset("trl-lib/ultrafeedback_binarized", split="train")
        ... )  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "dpo"]
    _name: ClassVar[str] = "DPO"
    _paper = Paper("Direct Preference Optimization: Your Language Model is Secretly a Reward Model", "2305.18290")
    args: DPOConfig
    method: DPOMethod
    _config_class: ClassVar[type] = DPOConfig
    _columns: tuple[str, ...] = (*PAIR_COLUMNS, *REFERENCE_COLUMNS, OWN_PROMPT)

    def __init__(
        self,
        model: str | nn.Module | PreTrainedModel | None = None,
        ref_model: PreTrainedModel | nn.Module | str | None = None,
        args: DPOConfig | None = None,
        data_collator: Callable[[list[Any]], dict[str, Any]] | None = None,
        train_dataset: AnyDataset | None = None,
        eval_dataset: AnyDataset | dict[str, AnyDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        peft_config: Any | None = None,
        **older: Any,
    ) -> None:
        policy, args = self.begin(model, args, processing_class, peft_config, older)
        assert isinstance(args, DPOConfig)
        self._take_policy(policy, args)
        self.reference = self._make_reference(policy, ref_model, args)
        self.with_images = isinstance(data_collator, DataCollatorForVisionPreference) or has_images(
            train_dataset, eval_dataset
        )
        if self.with_images:
            self._columns = images.PAIR_COLUMNS
            sets = images.image_pair_sets(data_collator, args, policy)
            data_collator = sets.collator
        else:
            sets = pair_sets(args, policy)
            data_collator = data_collator or pair_collator(policy, shares_prefix=self.shares_prefix)
        super().__init__(
            policy,
            args,
            sets=sets,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        self.take_reference(REFERENCE_COLUMNS, ld_alpha=args.ld_alpha)

    with_images: bool = False

    def _take_policy(self, policy: Policy, args: DPOConfig) -> None:
        self.scorer, self._tokenizer = policy.scorer, policy.tokenizer
        self.shares_prefix = shares_prefix(policy.scorer, args.prefix_sharing)
        self.layout = partial(as_pair_batch, prefix_sharing=self.shares_prefix)
        self.method = DPOMethod(args)

    def adopt(self) -> None:
        """Finish a trainer whose subclass calls `transformers.Trainer.__init__` in place of ours: attributes that were
        set (`beta`, `ref_model`, ...) are its settings, a `loss_type` that is not ours is its own affair.
        """
        args = self.adopted_args(DPOConfig)
        names = [args.loss_type] if isinstance(args.loss_type, str) else args.loss_type
        args.loss_type = [name for name in names if name in PAIR_LOSSES] or ["sigmoid"]
        self.args, model, ref_model = args, self.model, vars(self).get("ref_model")
        tokenizer: Any = text_tokenizer(self.processing_class)  # type: ignore[arg-type]
        policy = Policy(model, self.processing_class, tokenizer, make_scorer(model, tokenizer))  # type: ignore[arg-type]
        self._take_policy(policy, args)
        if ref_model is not None:
            self.reference = FrozenModel(ref_model, make_scorer(ref_model, tokenizer))
        elif is_peft_model(model):
            self.reference = self._make_reference(policy, None, args)
        self._sets = pair_sets(args, policy)
        super().adopt()

    # ---- the reference

    def _make_reference(self, policy: Policy, ref_model: Any, args: DPOConfig) -> Reference | None:
        if args.reference_free and ref_model is None and args.ref_adapter_name is None:
            choose_adapters(policy.model, args)
            return None
        return make_reference(policy.model, policy.scorer, ref_model, args=args, path=self._path)

    def reference_columns(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        return dict(zip(REFERENCE_COLUMNS, split_pairs(batch["ref_logps"]), strict=True))

    def add_reference(self, batch: dict[str, Any]) -> None:
        """Put the reference's log-probs `(2B,)` into the batch, `ref_logps`."""
        own = next((name for name in REFERENCES if self.overridden(name)), None)
        if own is not None:
            exact = torch.float32 if self.args.device.type == "mps" else torch.float64
            sides = [side.to(self.args.device, exact) for side in getattr(self, own)(batch.get(GIVEN, batch))]
            logps = torch.stack(sides, dim=1).flatten()
            if any(PAIR_LOSSES[name].per_token for name in self.args.loss_type):  # it gives means
                logps = logps * tokens_by_sequence(scored_sequences(batch), len(logps))
            batch["ref_logps"] = logps
        elif self.reference is None:
            batch.pop("ref_logps", None)
        elif "ref_logps" not in batch:
            batch["ref_logps"] = self.reference.score(self.model_wrapped, batch, self.completion_logps)  # type: ignore[arg-type]
