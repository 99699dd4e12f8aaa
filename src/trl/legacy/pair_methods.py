"""Methods that programs of 0.7-0.26 call on trainers of preferences, over the scoring and the objectives of today."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Literal

import torch
from datasets import Dataset
from torch import Tensor, nn

from trl.collators.preference import DPODataCollatorWithPadding
from trl.data.formats import Row, RowDict, common_prefix_length
from trl.data.pipeline import prepare_dataset
from trl.legacy.interface import (
    LOSSES,
    NOT_CALLED,
    RECORDED,
    REFERENCES,
    WHOLE_BATCH,
    Legacy,
    NotCalled,
    call_with,
    overrides,
)
from trl.methods.method import Batch, Method, Outcome, Scoring, Step
from trl.models.packed.layout import STEP_PART, padded_rows, scored_sequences
from trl.models.reference import AdapterReference
from trl.models.scoring.causal import Scored
from trl.models.scoring.head import ScoreOptions
from trl.models.switches import holding, undisturbed
from trl.objectives.pairs import PairScores, pair_metrics
from trl.objectives.preference import chosen_nll
from trl.tensors.padding import IGNORED, pad_to_length
from trl.tensors.reduce import LossTerms, Weighted, count_units, reduce_terms
from trl.tensors.sequences import tokens_by_sequence

SIDES = ("chosen", "rejected")


def concatenated_inputs(
    batch: Batch, is_encoder_decoder: bool = False, label_pad_token_id: int = IGNORED, padding_value: int = 0,
    device: torch.device | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """The columns `chosen_*` and `rejected_*` of a padded batch below each other: `concatenated_*` `(2B, T)`.

    Labels are padded with `label_pad_token_id`, token ids with `padding_value`, masks with 0. For an encoder-decoder,
    `concatenated_input_ids` and `concatenated_attention_mask` are the prompts, twice.
    """
    if not any(name.startswith(SIDES) for name in batch):
        is_encoder_decoder = "decoder_labels" in batch
        rows = [whole_sequences(row, is_encoder_decoder=is_encoder_decoder) for row in pairs_of(batch)]
        batch = DPODataCollatorWithPadding()(rows)
    fill = {"labels": label_pad_token_id, "input_ids": padding_value, "attention_mask": 0}
    columns = {name: both_sides(batch, name, value) for name, value in fill.items() if f"chosen_{name}" in batch}
    if is_encoder_decoder:
        columns |= {name: batch[f"prompt_{name}"].repeat(2, 1) for name in ("input_ids", "attention_mask")}
    return {f"concatenated_{name}": value.to(device) for name, value in columns.items()}


def both_sides(batch: Batch, name: str, fill: int) -> Tensor:
    """A column of chosen and of rejected `(B, T)` below each other, `(2B, T)`, filled up with `fill`."""
    sides = [batch[f"{side}_{name}"] for side in SIDES]
    width = max(side.shape[1] for side in sides)
    return torch.cat([pad_to_length(side, width, fill) for side in sides])


def sequences_of(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer of each sequence of a batch of one of the trainers' own collators, in whatever layout."""
    if "decoder_labels" in batch:
        masked = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
        prompts = [ids[mask].tolist() for ids, mask in masked]
        answers = [labels[labels != IGNORED].tolist() for labels in batch["decoder_labels"]]
        return [(prompts[at], answer) for at, answer in zip(batch["decoder_prompt"].tolist(), answers, strict=True)]
    padded, sequence = padded_rows(batch, pad_token_id=0), scored_sequences(batch)
    scored = tokens_by_sequence(sequence, len(padded["input_ids"]))
    if "prompt_tokens" in batch:  # of the chosen sequences the prompts are scored, too
        scored[::2] -= batch["prompt_tokens"]
    real = zip(padded["input_ids"], padded["attention_mask"].bool(), scored.tolist(), strict=True)
    return [(ids[mask][:-count].tolist(), ids[mask][-count:].tolist()) for ids, mask, count in real]


def pairs_of(batch: Batch) -> list[dict[str, list[int]]]:
    """The tokenised pairs of a batch of one of the trainers' own collators, in whatever layout."""
    names = ("prompt_input_ids", "chosen_input_ids", "rejected_prompt_input_ids", "rejected_input_ids")
    sequences = sequences_of(batch)
    pairs = zip(sequences[::2], sequences[1::2], strict=True)
    return [dict(zip(names, (*chosen, *rejected), strict=True)) for chosen, rejected in pairs]


def with_losses(terms: LossTerms, losses: Tensor) -> LossTerms:
    """Terms with an overridden method's losses, one for each or the mean. Raises: ValueError for others."""
    if losses.numel() not in (1, len(terms.values)):
        expected = f"{len(terms.values)}, one per {terms.per}, or their mean"
        raise ValueError(f"an overridden loss gave {losses.numel()} losses, expected {expected}.")
    return terms._replace(values=losses.reshape(-1).expand_as(terms.values))


def get_batch_logps(
    logits: Tensor, labels: Tensor, average_log_prob: bool = False, label_pad_token_id: int = IGNORED,
    is_encoder_decoder: bool = False,
) -> Tensor:  # fmt: skip
    """Log-prob of the labels under given logits, `(B, T, V), (B, T) -> (B,)`: a sum over tokens, or their mean.

    Labels are shifted here, except for an encoder-decoder; `label_pad_token_id` does not count. Raises: ValueError.
    """
    if logits.shape[:-1] != labels.shape:
        shapes = f"{tuple(logits.shape)} and {tuple(labels.shape)}"
        raise ValueError(f"logits and labels must agree in rows and tokens, got {shapes}. Take both from one batch.")
    if not is_encoder_decoder:
        logits, labels = logits[:, :-1], labels[:, 1:]
    counted = labels != label_pad_token_id
    index = labels.masked_fill(~counted, 0).unsqueeze(-1)
    logps = logits.gather(-1, index).squeeze(-1) - logits.logsumexp(dim=-1)
    totals = logps.masked_fill(~counted, 0.0).sum(dim=-1)
    return totals / counted.sum(dim=-1) if average_log_prob else totals


def whole_sequences(row: Row, *, is_encoder_decoder: bool) -> dict[str, list[int]]:
    """A row of pairs with the columns of 0.7-0.26: sequences (encoder-decoder: labels alone), and the prompt."""
    prompt = list(row["prompt_input_ids"])
    columns = {}
    for side in SIDES:
        completion = list(row[f"{side}_input_ids"])
        if is_encoder_decoder:
            columns[f"{side}_labels"] = completion
            continue
        start = list((side == "rejected" and row.get("rejected_prompt_input_ids")) or prompt)
        columns[f"{side}_input_ids"] = start + completion
        columns[f"{side}_attention_mask"] = [1] * len(start + completion)
        columns[f"{side}_labels"] = [IGNORED] * len(start) + completion
    return {**columns, "prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}


def mean_chosen_nll(scored: Scored) -> Tensor:
    """The mean negative log-likelihood of the chosen sequences' scored tokens, 0-dim."""
    nll = chosen_nll(scored.logps, scored.positions.sequence % 2 == 0)
    return reduce_terms(nll, count_units(nll))


def build_tokenized_answer(self: "LegacyPairs", prompt: str, answer: str) -> dict[str, list[int]]:
    """Token ids of a prompt and of an answer to it, cut where the tokens of both together leave the prompt's."""
    texts = (prompt, prompt + answer)
    head, whole = (self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
    start = common_prefix_length(head, whole)
    ids = {"prompt_": whole[:start], "": whole[start:]}
    masks = {f"{name}attention_mask": [1] * len(part) for name, part in ids.items()}
    return {**{f"{name}input_ids": part for name, part in ids.items()}, **masks}


class OverriddenBatch(Method):
    """The loss of an overridden `get_batch_loss_metrics` of a trainer, which logs through `store_metrics`."""

    def __init__(self, trainer: "LegacyPairs") -> None:
        self.trainer, self.method = trainer, trainer.method

    def score(self, batch: Batch, scoring: Scoring) -> Tensor:
        """The loss, 0-dim."""
        trainer, step = self.trainer, scoring.step
        override = next(name for name in WHOLE_BATCH if overrides(trainer, name))
        name = override if override in WHOLE_BATCH[:2] else WHOLE_BATCH[0]
        mode = "train" if step.training else "eval"
        options: RowDict = {"do_train": step.training} if hasattr(trainer, "bco_loss") else {"train_eval": mode}
        columns = {**batch.get(RECORDED, batch), **({STEP_PART: batch[STEP_PART]} if STEP_PART in batch else {})}
        with holding(trainer, "_is_counted", step.plan is not None):
            loss, metrics = call_with(getattr(trainer, name), scoring.model, columns, **options)
        with holding(trainer, "_rows_stored", float(self.method.count(batch)[0])):
            trainer.store_metrics(metrics, train_eval=mode)
        return loss

    def terms(self, batch: Batch, scored: Tensor, step: Step) -> Outcome:
        """The loss for each row."""
        values = scored.reshape(1).expand(int(self.method.count(batch)[0]))
        return Outcome([LossTerms(values, torch.ones_like(values), self.method.units[0], {})], None, None)


class OverriddenLoss(Method):
    """The method of a trainer with the losses of an overridden `dpo_loss`, `kto_loss`, ..."""

    def __init__(self, trainer: "LegacyPairs") -> None:
        self.trainer, self.learned, self.wants = trainer, trainer.method.learned, trainer.method.wants
        self.reference_names = trainer.method.reference_names

    def terms(self, batch: Batch, scored: Scored, step: Step) -> Outcome:
        """The losses of the overridden method."""
        with holding(self.trainer, "_is_counted", step.plan is not None):
            return self.trainer.recorded_outcome(batch, scored)


class LegacyJudged(Legacy):
    """What trainers of judged completions refuse."""

    _not_called: ClassVar[NotCalled] = NOT_CALLED


class LegacyReward(LegacyJudged):
    """Batches of `RewardTrainer` at 0.4-0.26."""

    def handed_out(self, batch: RowDict, drawn: Batch) -> Any:
        """The batch; an overridden `compute_loss` gets the columns of 0.4-0.26."""
        if not overrides(self, "compute_loss"):
            return batch
        if "rows" not in drawn:
            return drawn
        rows = padded_rows(batch, pad_token_id=self.scorer.pad_token_id)
        columns = {name: torch.cat([rows[name][0::2], rows[name][1::2]]) for name in ("input_ids", "attention_mask")}
        sides = {
            f"{name}_{side}": half for name in columns for side, half in zip(SIDES, columns[name].chunk(2), strict=True)
        }
        return {**columns, **sides, **({"margin": batch["margin"]} if "margin" in batch else {})}


class LegacyPairs(LegacyJudged):
    """Methods of 0.4-0.26 of trainers of preferences; training calls those that are overridden."""

    args: Any
    method: Any
    scorer: Any
    recorded_outcome: Callable[..., Outcome]  # of a batch and its scores, with the losses of an overridden method
    get_batch_logps = staticmethod(get_batch_logps)
    _rows_stored = 1.0  # of what `store_metrics` is given
    _is_counted = False  # rewards of the batch at hand move no mean again

    def handed_out(self, batch: RowDict, drawn: Batch) -> Any:
        """The batch, where methods are overridden with the columns that these read."""
        if not overrides(self, "compute_loss", *WHOLE_BATCH, *REFERENCES):
            return batch
        columns = self.recorded_columns(batch) if "rows" in drawn else drawn
        return {**columns, **batch, RECORDED: {**batch, **columns} if "rows" in drawn else drawn}

    def recorded_columns(self, batch: Batch) -> RowDict:
        """Whole sequences with labels, and the prompts, of a batch of pairs; padded."""
        rows = [whole_sequences(row, is_encoder_decoder=self.is_encoder_decoder) for row in pairs_of(batch)]
        return DPODataCollatorWithPadding(self.scorer.pad_token_id)(rows)

    def trained_method(self, step: Step) -> Method:
        """That of an overridden `get_batch_loss_metrics` (within a step), or of a loss such as `dpo_loss`."""
        if step.counts is not None and overrides(self, *WHOLE_BATCH):
            return OverriddenBatch(self)
        return OverriddenLoss(self) if overrides(self, *LOSSES) else self.method

    def with_logits(self, name: str, model: nn.Module, batch: Batch) -> tuple[Scored, Tensor]:
        """What the policy makes of a batch, and its logits, for the method `name`."""
        if self.is_encoder_decoder:
            fault = f"{name} gives logits over whole sequences, which encoder-decoders do not have"
            raise TypeError(f"{fault}. Call get_batch_loss_metrics, or the model.")
        with self.accelerator.autocast():
            return self.scorer.score_with_logits(model, batch, ScoreOptions())

    def get_batch_loss_metrics(
        self, model: nn.Module, batch: Batch, train_eval: Literal["train", "eval"] = "train"
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss of a batch by itself, with gradient, and its metrics; names begin with `eval_` for "eval"."""
        batch = self.handed_out(self.take_batch(batch), batch)
        units, outcome = self.method.count(batch), self.outcome(model, batch)
        values = {name: value for terms in outcome.terms for name, value in terms.metrics.items()}
        prefix = "eval_" if train_eval == "eval" else ""
        metrics = {f"{prefix}{name}": float(value.mean) for name, value in values.items()}
        if outcome.aux_loss is not None:
            metrics[f"{prefix}aux_loss"] = float(outcome.aux_loss.detach())
        loss = outcome.loss(self.method.units, units, units.clamp(min=1), router_weight=self.scorer.router_weight)
        return loss, metrics

    def store_metrics(self, metrics: Mapping[str, float], train_eval: Literal["train", "eval"] = "train") -> None:
        """Add numbers to the next log's means: each counts once, those of a whole batch as often as it has rows."""
        for name, value in metrics.items():
            pair = Weighted(torch.as_tensor(self._rows_stored * float(value)), torch.tensor(self._rows_stored))
            self._sums[train_eval].add({name.removeprefix("eval_") if train_eval == "eval" else name: pair})

    def generate_from_model(self, model: Any, batch: Batch) -> list[str]:
        """Prompts `(B, P)`, padded on the left, with what the model samples, up to `max_length` tokens, as text."""
        with self.accelerator.autocast(), torch.no_grad(), undisturbed(model):
            ids = model.generate(
                input_ids=batch["prompt_input_ids"], attention_mask=batch["prompt_attention_mask"],
                max_length=self.args.max_length, do_sample=True, pad_token_id=self.scorer.pad_token_id,
            )  # fmt: skip
        return self._tokenizer.batch_decode(ids, skip_special_tokens=True)


class LegacyReference(LegacyPairs):
    """The same, of those with a reference."""

    @contextmanager
    def null_ref_context(self) -> Iterator[Any]:
        """A block in which the policy is its own reference, if adapters are: its own off, or the reference's on."""
        lends = isinstance(self.reference, AdapterReference)
        with self.reference.active(self.model) if lends else nullcontext(self.model) as model:
            yield model

    def generate_from_model_and_ref(self, model: Any, batch: Batch) -> tuple[list[str], list[str]]:
        """`generate_from_model` of the policy and of the reference. Raises: ValueError without a reference model."""
        if not hasattr(self.reference, "active"):
            reason = "reference_free or precompute_ref_log_probs"
            raise ValueError(f"no reference to generate with ({reason}). Set both to False.")
        if "prompt_input_ids" not in batch:
            batch = self.recorded_columns(self.take_batch(batch))
        with self.reference.active(self.model_wrapped) as reference:
            texts = self.generate_from_model(reference, batch)
        return self.generate_from_model(model, batch), texts


class LegacyReferenceFree(LegacyPairs):
    """Methods of `CPOTrainer` and `ORPOTrainer` at 0.8-0.26."""

    _loss_method: ClassVar[str]
    _loss_sign: ClassVar[int] = 1  # -1 for a method that gives what is subtracted
    concatenated_inputs = staticmethod(concatenated_inputs)
    build_tokenized_answer = build_tokenized_answer

    def recorded_outcome(self, batch: RowDict, scored: Scored) -> Outcome:
        """The outcome with losses and rewards of an overridden `cpo_loss` or `odds_ratio_loss`."""
        scores = self.method.pair_scores(batch, scored)
        losses, chosen, rejected, *_ = getattr(self, self._loss_method)(scores.chosen, scores.rejected)
        terms = with_losses(self.method.loss(scores), self._loss_sign * losses)
        logged = pair_metrics(chosen, rejected, chosen_logps=scores.chosen, rejected_logps=scores.rejected)
        return self.method.outcome(terms._replace(metrics={**terms.metrics, **logged}), scores, batch, scored)

    def concatenated_forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Log-probs `(B,)` (means where the loss takes those), logits `(B, T, V)` of both sides, with gradient.

        Last comes the mean negative log-likelihood of the chosen sequences. Raises: TypeError for an encoder-decoder.
        """
        batch = self.take_batch(batch)
        scored, logits = self.with_logits("concatenated_forward", model, batch)
        scores, nll = self.method.pair_scores(batch, scored), mean_chosen_nll(scored)
        return scores.chosen, scores.rejected, logits[0::2], logits[1::2], nll

    def tokenize_row(self, feature: Row, model: object = None) -> dict[str, list[int]]:
        """A row of `prompt`, `chosen` and `rejected` as token ids and labels, cut as training rows are."""
        row, sets = Dataset.from_list([dict(feature)]), self._sets
        prepared, _ = prepare_dataset(row, sets.processing_class, sets.settings, name="tokenize_row")
        return whole_sequences(prepared[0], is_encoder_decoder=self.is_encoder_decoder)


class LegacyCPO(LegacyReferenceFree):
    """The loss of `CPOTrainer`."""

    _loss_method: ClassVar[str] = "cpo_loss"

    def cpo_loss(self, policy_chosen_logps: Tensor, policy_rejected_logps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Losses and rewards of chosen and rejected, `(B,)` each, from log-probs `(B,)` (means for ipo and simpo)."""
        losses = self.method.loss(PairScores.without_reference(policy_chosen_logps, policy_rejected_logps)).values
        return losses, self.method.rewards(policy_chosen_logps), self.method.rewards(policy_rejected_logps)


class LegacyORPO(LegacyReferenceFree):
    """The loss of `ORPOTrainer`."""

    _loss_method: ClassVar[str] = "odds_ratio_loss"
    _loss_sign: ClassVar[int] = -1

    def odds_ratio_loss(
        self, policy_chosen_logps: Tensor, policy_rejected_logps: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """`beta log s(log odds ratio)`, to subtract from the likelihood's loss, and rewards of both sides, `(B,)` each.

        Then the means of `log s(log odds ratio)` and of the log odds ratio; all from mean log-probs `(B,)`.
        """
        terms = self.method.loss(PairScores.without_reference(policy_chosen_logps, policy_rejected_logps))
        rewards = self.method.rewards(policy_chosen_logps), self.method.rewards(policy_rejected_logps)
        means = terms.metrics["log_odds_ratio"].mean, terms.metrics["log_odds_chosen"].mean
        return -terms.values, *rewards, *means
