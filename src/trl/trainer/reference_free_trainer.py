"""What CPO and ORPO share: pairs that are scored by the policy alone, and the likelihood of the chosen ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
    set_seed,
)

from trl.collators.preference import OWN_PROMPT, PAIR_COLUMNS, as_pair_batch, with_prompts_scored
from trl.legacy import pair_methods
from trl.models.packed.layout import pair_units, row_count
from trl.models.policy import is_encoder_decoder
from trl.models.scoring.base import shares_prefix
from trl.models.scoring.causal import Scored, mean_logits
from trl.models.scoring.head import ScoreOptions
from trl.objectives.pairs import PairScores, pair_metrics
from trl.objectives.preference import chosen_nll
from trl.tensors.reduce import LossTerms, Unit
from trl.tensors.sequences import positions_in_sequence, split_pairs, sum_by_sequence, tokens_by_sequence
from trl.trainer.method import Method, Outcome, Step
from trl.trainer.preference_trainer import PreferenceTrainer, pair_collator, pair_sets

AnyDataset = Dataset | IterableDataset


class PairTokens(NamedTuple):
    """Which of K scored tokens are what, bool `(K,)`: of a chosen sequence (its prompt too, where that is scored), and
    of a prompt."""

    chosen: Tensor
    prompt: Tensor


class ReferenceFreeMethod(Method):
    """What the mathematics of CPO and ORPO share.

    The loss is a mean over all pairs of an optimiser step, plus `nll_coefficient` times the chosen sequences' negative
    log-likelihood, a mean over all their scored tokens in that step.
    """

    units: ClassVar[tuple[Unit, ...]] = ("pair", "token")
    scores_prompts: ClassVar[bool] = False  # the likelihood includes that of the chosen prompts, of a decoder
    per_token: bool  # completions are compared by means over their tokens, not by sums
    nll_coefficient: float  # the weight of the chosen sequences' likelihood

    def __init__(self, args: Any) -> None:
        self.args = args

    def loss(self, scores: PairScores) -> LossTerms:
        """The loss of each pair, with its metrics."""
        raise TypeError(f"{type(self).__name__} must override loss.")

    def rewards(self, logps: Tensor) -> Tensor:
        """The implicit rewards of completions, from what the loss knows of their log-probs, elementwise; detached."""
        return self.args.beta * logps.detach()

    def options(self, *, statistics: bool) -> ScoreOptions:
        """With the mean logits."""
        return ScoreOptions(mean_logits=True)

    def count(self, batch: Mapping[str, Any]) -> Tensor:
        """How many pairs a batch has, and how many scored tokens their chosen sequences."""
        return pair_units(batch)

    def terms(self, batch: Mapping[str, Any], scored: Scored, step: Step) -> Outcome:
        """The losses of a batch's pairs, and the likelihood of their chosen sequences."""
        scores = self.pair_scores(batch, scored)
        return self.outcome(self.loss(scores), scores, batch, scored)

    def outcome(self, terms: LossTerms, scores: PairScores, batch: Mapping[str, Any], scored: Scored) -> Outcome:
        """Terms of pairs with the chosen sequences' likelihood; predictions are the rewards."""
        tokens = _pair_tokens(scored, batch)
        nll = chosen_nll(scored.logps, tokens.chosen, coefficient=self.nll_coefficient)
        nll = nll._replace(metrics={**nll.metrics, **mean_logits(scored, ~tokens.prompt)})
        rewards = torch.stack([self.rewards(scores.chosen), self.rewards(scores.rejected)], dim=1)
        labels = torch.zeros(len(rewards), dtype=torch.int64, device=rewards.device)
        return Outcome([terms, nll], rewards, labels, scored.aux_loss)

    def pair_scores(self, batch: Mapping[str, Any], scored: Scored) -> PairScores:
        """Log-probs of a batch's completions: sums, or means where the loss takes means."""
        count, completion = 2 * row_count(batch, per_row=2), ~_pair_tokens(scored, batch).prompt
        sequence = scored.positions.sequence[completion]
        sums = split_pairs(sum_by_sequence(scored.logps[completion], sequence, count))
        scores = PairScores.without_reference(*sums)
        if not self.per_token:
            return scores
        return scores.per_token(*split_pairs(tokens_by_sequence(sequence, count)))


class ReferenceFreeTrainer(PreferenceTrainer):
    """Base of `CPOTrainer` and `ORPOTrainer`."""

    method: ReferenceFreeMethod

    # methods of 0.8-0.26, which training calls where they are overridden
    concatenated_forward = pair_methods.concatenated_forward
    concatenated_inputs = staticmethod(pair_methods.concatenated_inputs)
    recorded_columns = pair_methods.recorded_columns
    get_batch_logps = staticmethod(pair_methods.get_batch_logps)
    get_batch_loss_metrics = pair_methods.get_batch_loss_metrics
    store_metrics = pair_methods.store_metrics
    tokenize_row = pair_methods.tokenize_row
    build_tokenized_answer = pair_methods.build_tokenized_answer
    generate_from_model = pair_methods.generate_from_model

    args: Any
    _columns: tuple[str, ...] = (*PAIR_COLUMNS, OWN_PROMPT)
    _method_class: ClassVar[type[ReferenceFreeMethod]]
    _loss_method: ClassVar[str]
    _loss_sign: ClassVar[int] = 1  # -1 for a method that gives what is subtracted

    def __init__(
        self,
        model: PreTrainedModel | nn.Module | str | None = None,
        args: Any = None,
        data_collator: Callable[[list[Any]], dict[str, Any]] | None = None,
        train_dataset: AnyDataset | None = None,
        eval_dataset: AnyDataset | dict[str, AnyDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        model_init: Callable[..., PreTrainedModel] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        peft_config: Any | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        **older: Any,
    ) -> None:
        if model_init is not None:
            if model is not None:
                raise ValueError("model and model_init were both given, expected one. Leave out the other.")
            set_seed(42 if args is None else args.seed)
            model = model_init()
        policy, args = self.begin(model, args, processing_class, peft_config, older)
        self.is_encoder_decoder = is_encoder_decoder(policy.scorer.core, args)
        self.shares_prefix = shares_prefix(policy.scorer, args.prefix_sharing)
        self.method = self._method_class(args)
        pairs = partial(as_pair_batch, prefix_sharing=self.shares_prefix)
        scores_prompts = self.method.scores_prompts and not self.is_encoder_decoder
        self.layout = (lambda batch: with_prompts_scored(pairs(batch))) if scores_prompts else pairs
        super().__init__(
            policy,
            args,
            sets=pair_sets(args, policy, truncation_order="prompt_first"),
            data_collator=data_collator or pair_collator(policy, shares_prefix=self.shares_prefix),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )

    def recorded_outcome(self, model: nn.Module, batch: dict[str, Any], scored: Scored) -> Outcome:
        """The outcome with losses and rewards of an overridden `cpo_loss` or `odds_ratio_loss`."""
        scores = self.method.pair_scores(batch, scored)
        losses, chosen, rejected, *_ = getattr(self, self._loss_method)(scores.chosen, scores.rejected)
        terms = pair_methods.with_losses(self.method.loss(scores), self._loss_sign * losses)
        logged = pair_metrics(chosen, rejected, chosen_logps=scores.chosen, rejected_logps=scores.rejected)
        return self.method.outcome(terms._replace(metrics={**terms.metrics, **logged}), scores, batch, scored)


def _pair_tokens(scored: Scored, batch: Mapping[str, Any]) -> PairTokens:
    sequence = scored.positions.sequence
    chosen, prompt_tokens = sequence % 2 == 0, batch.get("prompt_tokens")
    if prompt_tokens is None:
        return PairTokens(chosen, torch.zeros_like(chosen))
    prompts = torch.stack([prompt_tokens, torch.zeros_like(prompt_tokens)], dim=1).flatten()
    return PairTokens(chosen, positions_in_sequence(sequence, len(prompts)) < prompts[sequence])
