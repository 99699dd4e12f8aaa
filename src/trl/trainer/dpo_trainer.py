"""Direct preference optimisation and its family: learning from pairs against a reference policy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
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
from trl.collators.preference import PAIR_COLUMNS, REFERENCE_COLUMNS, as_pair_batch
from trl.collators.vision import DataCollatorForVisionPreference
from trl.data.image_rows import has_images
from trl.data.preference import OWN_PROMPT
from trl.data.rendering import text_tokenizer
from trl.legacy import DPO_ARGUMENTS, move_onto_config
from trl.models.lending import undisturbed
from trl.models.pairs import mean_logits, pair_units, row_count, shares_prefix
from trl.models.peft import is_peft_model
from trl.models.policy import Policy, make_scorer, set_up_policy
from trl.models.reference import FrozenModel, Reference, do_without_reference, make_reference
from trl.models.scoring.causal import Scored
from trl.models.scoring.head import ScoreOptions
from trl.objectives.pairs import PairScores, StepStatistics, step_statistics
from trl.objectives.preference import (
    NEEDS_STEP,
    PAIR_LOSSES,
    PER_TOKEN,
    chosen_nll,
    nll_coefficient,
    preference_terms,
)
from trl.reporting.step_scores import RunningMean, rows_of_all
from trl.tensors.reduce import Unit, weighted
from trl.tensors.sequences import (
    alignment_by_sequence,
    length_desensitized,
    split_pairs,
    sum_by_sequence,
    tokens_by_sequence,
    wpo_weights,
)
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_images import PAIR_RAW_COLUMNS, ImagePairSets, collator_for_image_pairs
from trl.trainer.legacy_interface import GIVEN, REFERENCES
from trl.trainer.older_dpo import OlderDPOMethods
from trl.trainer.precompute import ReferencePass
from trl.trainer.preference_trainer import Outcome, PreferenceTrainer
from trl.trainer.prepared_sets import pair_collator, pair_sets

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere

AnyDataset = Dataset | IterableDataset


class DPOTrainer(OlderDPOMethods, PreferenceTrainer):
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
        compute_metrics: `EvalPrediction -> dict`; predictions `(N, 2)` are the rewards of chosen and rejected, labels 0.
        peft_config: trains a new adapter with these settings instead of the model.

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
    _paper: ClassVar[dict[str, str]] = {
        "title": "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
        "id": "2305.18290",
    }
    args: DPOConfig
    units: ClassVar[tuple[Unit, ...]] = ("pair", "token")
    _columns: ClassVar[tuple[str, ...]] = (*PAIR_COLUMNS, *REFERENCE_COLUMNS, OWN_PROMPT)

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
        model, args, processing_class = move_onto_config(
            DPO_ARGUMENTS, DPOConfig, model=model, args=args, processing_class=processing_class, older=older
        )
        assert isinstance(args, DPOConfig)
        policy = set_up_policy(model, args, processing_class, peft_config)
        self._take_policy(policy, args)
        self.reference = self._make_reference(
            policy, ref_model, model_path=model if isinstance(model, str) else None, args=args
        )
        self.with_images = isinstance(data_collator, DataCollatorForVisionPreference) or has_images(
            train_dataset, eval_dataset
        )
        if self.with_images:
            data_collator = collator_for_image_pairs(
                data_collator, args, policy.processing_class, policy.model
            )
            sets = ImagePairSets(data_collator, policy.model)
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
        self.take_reference(
            REFERENCE_COLUMNS, self._reference_pass() if args.precompute_ref_log_probs else None
        )

    with_images: bool = False

    def _take_policy(self, policy: Policy, args: DPOConfig) -> None:
        self.scorer = policy.scorer
        self.shares_prefix = shares_prefix(policy.scorer, args.prefix_sharing)
        self._nll_coefficient = nll_coefficient(args.loss_type, args.loss_weights, args.rpo_alpha)
        self._compares_pairs = bool(NEEDS_STEP & set(args.loss_type))
        self._step_statistics: deque[StepStatistics] = deque()
        self._rewards = RunningMean()

    def adopt(self) -> None:
        """Finish a trainer whose subclass calls `transformers.Trainer.__init__` in place of ours: attributes that were set (`beta`,
        `ref_model`, ...) are its settings, a `loss_type` that is not ours is its own affair."""
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
            self.reference = self._make_reference(policy, None, model_path=None, args=args)
        self._sets = pair_sets(args, policy)
        super().adopt()

    # ---- the reference

    def _make_reference(
        self, policy: Policy, ref_model: Any, *, model_path: str | None, args: DPOConfig
    ) -> Reference | None:
        if args.reference_free and ref_model is None and args.ref_adapter_name is None:
            do_without_reference(
                policy.model,
                ref_model_init_kwargs=args.ref_model_init_kwargs,  # type: ignore[arg-type]
                model_adapter_name=args.model_adapter_name,
            )
            return None
        return make_reference(
            policy.model,
            scorer=policy.scorer,
            make_scorer=lambda model: make_scorer(model, policy.tokenizer),
            ref_model=ref_model,
            ref_model_init_kwargs=args.ref_model_init_kwargs,  # type: ignore[arg-type]
            model_adapter_name=args.model_adapter_name,
            ref_adapter_name=args.ref_adapter_name,
            force_use_ref_model=args.force_use_ref_model,
            model_path=model_path,
            model_init_kwargs=args.model_init_kwargs,  # type: ignore[arg-type]
            precompute=args.precompute_ref_log_probs,
        )

    def _reference_pass(self) -> ReferencePass:
        """How rows are scored by the reference in advance."""

        def score(batch: Mapping[str, Any]) -> dict[str, Tensor]:
            assert self.reference is not None and self.model is not None
            logps = self.reference.score(self.model, self.take_batch(batch), self.reference_logps)
            return dict(zip(REFERENCE_COLUMNS, split_pairs(logps), strict=True))

        return ReferencePass(
            columns=REFERENCE_COLUMNS,
            collate=self.data_collator,
            score=score,
            batch_size=self.args.precompute_ref_batch_size or self.args.per_device_train_batch_size,
            settings={"ld_alpha": self.args.ld_alpha},
        )

    # ---- the data

    def take_batch(self, batch: Any) -> Any:
        """A batch in the form of `PairCollator`."""
        return as_pair_batch(batch, prefix_sharing=self.shares_prefix)

    def count_units(self, batch: Mapping[str, Any]) -> Tensor:
        """How many pairs a batch has, and how many tokens their chosen completions."""
        return pair_units(batch)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if self.with_images:
            self._signature_columns = list(PAIR_RAW_COLUMNS)

    # ---- the loss

    def prepare_step(self, batches: list[Any]) -> None:
        """Score a step of several micro-batches without gradient where a loss compares its pairs with each other."""
        self._step_statistics.clear()
        if self._compares_pairs and len(batches) > 1:
            model: Any = self.model_wrapped
            with torch.no_grad(), undisturbed(model):
                found = [self._compared(self.pair_scores(model, batch)[0]) for batch in batches]
            self._step_statistics.extend(self._statistics(found))

    def _statistics(self, found: list[PairScores]) -> list[StepStatistics]:
        """What each micro-batch must know of all pairs of the step, on all processes; counts their rewards."""
        columns = [[s.chosen, s.rejected, s.ref_chosen, s.ref_rejected] for s in found]
        own = torch.cat([torch.stack(column, dim=1).detach() for column in columns])
        table, first = rows_of_all(own, self.accelerator)
        chosen, rejected, ref_chosen, ref_rejected = table.unbind(dim=1)
        scores = PairScores(chosen, rejected, ref_chosen, ref_rejected)
        self._rewards.add(weighted(self.args.beta * torch.cat(scores.ratios)))
        statistics = self.with_running_delta(step_statistics(scores, self.args.beta))
        parts = []
        for part in found:
            parts.append(statistics.rows(slice(first, first + len(part.chosen))))
            first += len(part.chosen)
        return parts

    def with_running_delta(self, statistics: StepStatistics) -> StepStatistics:
        """The mean reward of the run so far, in place of the step's (BCO, arXiv:2404.04656)."""
        if not self._rewards.count:
            return statistics
        return replace(statistics, delta=torch.full_like(statistics.delta, self._rewards.value))

    def _step_of(self, scores: PairScores) -> StepStatistics | None:
        """What a batch's losses compare it with: its optimiser step, or itself in an evaluation."""
        if not self._compares_pairs:
            return None
        if self.mode == "eval":
            return self.with_running_delta(step_statistics(scores, self.args.beta))
        return self._step_statistics.popleft() if self._step_statistics else self._statistics([scores])[0]

    def method_state(self) -> dict[str, Any]:
        """The rewards counted so far."""
        return {**super().method_state(), "rewards": self._rewards.state()}

    def load_method_state(self, state: Mapping[str, Any]) -> None:
        """Go on from the rewards counted so far."""
        super().load_method_state(state)
        if "rewards" in state:
            self._rewards.load_state(state["rewards"])

    def pair_scores(self, model: nn.Module, batch: dict[str, Any]) -> tuple[PairScores, Scored]:
        """Log-probs of policy and reference of a batch's pairs; the reference's stay in the batch, as `ref_logps`."""
        args, sequences = self.args, 2 * row_count(batch, per_row=2)
        own = next((name for name in REFERENCES if self.overridden(name)), None)
        if self.reference is not None and own is None and "ref_logps" not in batch:
            batch["ref_logps"] = self.reference.score(model, batch, self.reference_logps)
        scored = self.score(model, batch, ScoreOptions(collision=args.use_weighting, mean_logits=True))
        policy = self.totals(scored, sequences)
        reference = batch.get("ref_logps") if self.reference is not None else None
        reference = torch.zeros_like(policy) if reference is None else reference.to(policy)
        scores = PairScores(*split_pairs(policy), *split_pairs(reference))
        if PER_TOKEN & set(args.loss_type):
            lengths = tokens_by_sequence(scored.positions.sequence, sequences)
            scores = scores.per_token(*split_pairs(lengths))
        if own is not None:
            ref_chosen, ref_rejected = getattr(self, own)(batch.get(GIVEN, batch))
            scores = replace(scores, ref_chosen=ref_chosen.to(policy), ref_rejected=ref_rejected.to(policy))
        return scores, scored

    def outcome(self, model: nn.Module, batch: dict[str, Any]) -> Outcome:
        """The losses of a batch's pairs, and the likelihood of their chosen completions where it is part of the loss."""
        args, is_own = self.args, self.overridden("dpo_loss")
        logged, scored = self.pair_scores(model, batch)
        scores = self._compared(logged)
        scores = replace(scores, step=self._step_of(scores))
        terms = preference_terms(
            scores,
            args.loss_type,
            args.pair_options(),
            loss_weights=args.loss_weights,
            pair_weights=self.pair_weights(scored, len(logged.chosen)),
            logged=logged,
        )
        if is_own:
            terms = self.recorded_terms(terms, logged, scored)
        parts = [terms._replace(metrics={**terms.metrics, **mean_logits(scored)})]
        if (
            coefficient := args.rpo_alpha if is_own else self._nll_coefficient
        ):  # its own loss has that of "sft"
            parts.append(
                chosen_nll(scored.logps, scored.positions.sequence % 2 == 0, coefficient=coefficient)
            )
        rewards = args.beta * torch.stack(logged.ratios, dim=1)
        labels = torch.zeros(len(rewards), dtype=torch.int64, device=rewards.device)
        return Outcome(parts, rewards, labels, scored.aux_loss)

    def _compared(self, scores: PairScores) -> PairScores:
        """The scores that the loss sees: with `reference_free`, against a reference of 0."""
        if not self.args.reference_free:
            return scores
        return PairScores.without_reference(scores.chosen, scores.rejected)

    def reference_logps(self, scorer: Any, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Log-probs `(2B,)` of a batch's completions under the reference."""
        with self.accelerator.autocast():
            scored = scorer.score(model, batch, ScoreOptions())
        return self.totals(scored, 2 * row_count(batch, per_row=2))

    def totals(self, scored: Scored, count: int) -> Tensor:
        """Log-prob of each completion, those of tokens past the shorter one's length discounted by `ld_alpha`."""
        sequence, alpha = scored.positions.sequence, self.args.ld_alpha
        if alpha is None:
            return sum_by_sequence(scored.logps, sequence, count)
        return length_desensitized(scored.logps, sequence, count, alpha=alpha)

    def pair_weights(self, scored: Scored, pairs: int) -> Tensor | None:
        if not self.args.use_weighting:
            return None
        assert scored.log_collision is not None
        alignment = alignment_by_sequence(
            scored.logps, scored.log_collision, scored.positions.sequence, 2 * pairs
        )
        return wpo_weights(*split_pairs(alignment))
