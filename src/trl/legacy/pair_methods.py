"""Methods that programs of 0.7-0.26 call on trainers of preferences, over the scoring and the objectives of today."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from datasets import Dataset
from torch import Tensor, nn

from trl.collators.preference import DPODataCollatorWithPadding
from trl.collators.unpaired import REFERENCE_NAMES
from trl.data.formats import common_prefix_length
from trl.legacy.interface import GIVEN, WHOLE_BATCH, call_with, takes
from trl.methods.method import Method, Outcome, Scoring, Step
from trl.models.packed.layout import padded_rows, row_count, scored_sequences
from trl.models.reference import AdapterReference
from trl.models.scoring.causal import Scored
from trl.models.scoring.head import ScoreOptions
from trl.models.switches import holding, undisturbed
from trl.objectives.preference import chosen_nll
from trl.objectives.unpaired import UnpairedScores, unpaired_metrics
from trl.tensors.padding import IGNORED, pad_to_length
from trl.tensors.reduce import LossTerms, Weighted, count_units, reduce_terms, weighted
from trl.tensors.sequences import sum_by_sequence, tokens_by_sequence

SIDES = ("chosen", "rejected")


class OverriddenBatch(Method):
    """The loss of an overridden `get_batch_loss_metrics` of a trainer, which logs through `store_metrics`."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.method = trainer, trainer.method

    def score(self, batch: Mapping[str, Any], scoring: Scoring) -> Tensor:
        trainer, step = self.trainer, scoring.step
        own = next(name for name in WHOLE_BATCH if trainer.overridden(name))
        name, mode = own if own in WHOLE_BATCH[:2] else WHOLE_BATCH[0], "train" if step.training else "eval"
        takes_do_train = takes(trainer._own_methods[name], "do_train")  # BCO's
        given: dict[str, Any] = {"do_train": step.training} if takes_do_train else {"train_eval": mode}
        with holding(trainer, "_is_counted", step.plan is not None):
            loss, metrics = call_with(getattr(trainer, name), scoring.model, batch.get(GIVEN, batch), **given)
        with holding(trainer, "_rows_stored", float(self.method.count(batch)[0])):
            trainer.store_metrics(metrics, train_eval=mode)
        return loss

    def terms(self, batch: Mapping[str, Any], scored: Tensor, step: Step) -> Outcome:
        values = scored.reshape(1).expand(int(self.method.count(batch)[0]))
        return Outcome([LossTerms(values, torch.ones_like(values), self.method.units[0], {})], None, None)


class OverriddenLoss(Method):
    """The method of a trainer with the losses of an overridden `dpo_loss`, `kto_loss`, ..."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.learned, self.wants = trainer, trainer.method.learned, trainer.method.wants

    def terms(self, batch: Mapping[str, Any], scored: Scored, step: Step) -> Outcome:
        with holding(self.trainer, "_is_counted", step.plan is not None):
            return self.trainer.recorded_outcome(batch, scored)


def concatenated_inputs(
    batch: Mapping[str, Any],
    is_encoder_decoder: bool = False,
    label_pad_token_id: int = IGNORED,
    padding_value: int = 0,
    device: torch.device | None = None,
) -> dict[str, Tensor]:
    """The columns `chosen_*` and `rejected_*` of a padded batch below each other: `concatenated_*` `(2B, T)`.

    Labels are padded with `label_pad_token_id`, token ids with `padding_value`, masks with 0. For an encoder-decoder,
    `concatenated_input_ids` and `concatenated_attention_mask` are the prompts, twice. A batch of the trainer's own
    collator, which has no such columns, is padded first.
    """
    if not any(name.startswith(SIDES) for name in batch):
        is_encoder_decoder = "decoder_labels" in batch
        rows = [whole_sequences(row, is_encoder_decoder=is_encoder_decoder) for row in pairs_of(batch)]
        batch = DPODataCollatorWithPadding()(rows)
    fill = {"labels": label_pad_token_id, "input_ids": padding_value, "attention_mask": 0}
    found = {
        f"concatenated_{name}": both_sides(batch, name, value)
        for name, value in fill.items()
        if f"chosen_{name}" in batch
    }
    if is_encoder_decoder:
        found |= {
            f"concatenated_{name}": batch[f"prompt_{name}"].repeat(2, 1) for name in ("input_ids", "attention_mask")
        }
    return {name: value.to(device) for name, value in found.items()}


def both_sides(batch: Mapping[str, Any], name: str, fill: int) -> Tensor:
    """A column of chosen and of rejected `(B, T)` below each other, `(2B, T)`, filled up with `fill`."""
    sides = [batch[f"{side}_{name}"] for side in SIDES]
    width = max(side.shape[1] for side in sides)
    return torch.cat([pad_to_length(side, width, fill) for side in sides])


def sequences_of(batch: Mapping[str, Any]) -> list[tuple[list[int], list[int]]]:
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


def pairs_of(batch: Mapping[str, Any]) -> list[dict[str, list[int]]]:
    """The tokenised pairs of a batch of one of the trainers' own collators, in whatever layout."""
    names = ("prompt_input_ids", "chosen_input_ids", "rejected_prompt_input_ids", "rejected_input_ids")
    found = sequences_of(batch)
    each = zip(found[::2], found[1::2], strict=True)
    return [dict(zip(names, (*chosen, *rejected), strict=True)) for chosen, rejected in each]


def with_losses(terms: LossTerms, losses: Tensor) -> LossTerms:
    """Terms with the losses of an overridden method in the place of their values: one for each, or the mean.

    Raises: ValueError for any other number of them.
    """
    if losses.numel() not in (1, len(terms.values)):
        raise ValueError(
            f"an overridden loss gave {losses.numel()} losses, expected {len(terms.values)}, one per {terms.per}, or their mean."
        )
    return terms._replace(values=losses.reshape(-1).expand_as(terms.values))


def get_batch_logps(
    logits: Tensor,
    labels: Tensor,
    average_log_prob: bool = False,
    label_pad_token_id: int = IGNORED,
    is_encoder_decoder: bool = False,
) -> Tensor:
    """Log-prob of the labels under given logits, `(B, T, V), (B, T) -> (B,)`: a sum over tokens, or their mean.

    Labels are shifted here, except for an encoder-decoder; those equal to `label_pad_token_id` do not count. Training
    does not call it: it never builds logits. Raises ValueError for shapes that differ.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits and labels must agree in rows and tokens, got {tuple(logits.shape)} and {tuple(labels.shape)}. Take "
            "both from the same padded batch."
        )
    if not is_encoder_decoder:
        logits, labels = logits[:, :-1], labels[:, 1:]
    counted = labels != label_pad_token_id
    index = labels.masked_fill(~counted, 0).unsqueeze(-1)
    logps = logits.gather(-1, index).squeeze(-1) - logits.logsumexp(dim=-1)
    totals = logps.masked_fill(~counted, 0.0).sum(dim=-1)
    return totals / counted.sum(dim=-1) if average_log_prob else totals


def whole_sequences(row: Mapping[str, Any], *, is_encoder_decoder: bool) -> dict[str, list[int]]:
    """A prepared row of pairs with the columns of 0.7-0.26: sequences with labels, and the prompt.

    An encoder-decoder's sequences are its labels alone.
    """
    prompt = list(row["prompt_input_ids"])
    found = {}
    for side in SIDES:
        completion = list(row[f"{side}_input_ids"])
        if is_encoder_decoder:
            found[f"{side}_labels"] = completion
            continue
        own = list((side == "rejected" and row.get("rejected_prompt_input_ids")) or prompt)
        found[f"{side}_input_ids"] = own + completion
        found[f"{side}_attention_mask"] = [1] * len(own + completion)
        found[f"{side}_labels"] = [IGNORED] * len(own) + completion
    return {**found, "prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}


def concatenated_forward(
    self: Any, model: nn.Module, batch: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Log-probs of chosen and rejected completions `(B,)` each, their logits `(B, T, V)` each, and the mean negative
    log-likelihood of the chosen sequences (which is part of the loss), with gradient.

    Log-probs are means where the loss is of those. Raises TypeError for an encoder-decoder.
    """
    batch = self.take_batch(batch)
    scored, logits = _with_logits(self, "concatenated_forward", model, batch)
    scores, nll = self.method.pair_scores(batch, scored), mean_chosen_nll(scored)
    return scores.chosen, scores.rejected, logits[0::2], logits[1::2], nll


def _with_logits(self: Any, name: str, model: nn.Module, batch: Mapping[str, Any]) -> tuple[Scored, Tensor]:
    """What the policy makes of a batch, and its logits, for the method `name`."""
    if self.is_encoder_decoder:
        raise TypeError(
            f"{name} gives logits over whole sequences, which encoder-decoders do not have. Call get_batch_loss_metrics, or the "
            "model."
        )
    with self.accelerator.autocast():
        return self.scorer.score_with_logits(model, batch, ScoreOptions())


def mean_chosen_nll(scored: Scored) -> Tensor:
    """The mean negative log-likelihood of the chosen sequences' scored tokens, 0-dim."""
    nll = chosen_nll(scored.logps, scored.positions.sequence % 2 == 0)
    return reduce_terms(nll, count_units(nll))


def recorded_columns(self: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Whole sequences with labels, and the prompts, of a batch of pairs; padded."""
    rows = [whole_sequences(row, is_encoder_decoder=self.is_encoder_decoder) for row in pairs_of(batch)]
    return DPODataCollatorWithPadding(self.scorer.pad_token_id)(rows)


def get_batch_loss_metrics(
    self: Any, model: nn.Module, batch: Mapping[str, Any], train_eval: Literal["train", "eval"] = "train"
) -> tuple[Tensor, dict[str, float]]:
    """The loss of a batch by itself, with gradient, and its metrics; names begin with `eval_` for "eval"."""
    batch = self.handed_out(self.take_batch(batch), batch)
    own, found = self.method.count(batch), self.outcome(model, batch)
    values = {name: value for terms in found.terms for name, value in terms.metrics.items()}
    prefix = "eval_" if train_eval == "eval" else ""
    metrics = {f"{prefix}{name}": float(value.mean) for name, value in values.items()}
    if found.aux_loss is not None:
        metrics[f"{prefix}aux_loss"] = float(found.aux_loss.detach())
    loss = found.loss(self.method.units, own, own.clamp(min=1), router_weight=self.aux_loss_coef)
    return loss, metrics


def store_metrics(self: Any, metrics: Mapping[str, float], train_eval: Literal["train", "eval"] = "train") -> None:
    """Add numbers to the metrics that the next log averages: each counts once, those of an overridden
    `get_batch_loss_metrics` as often as their batch has rows.

    A subclass with `_stored_metrics` of its own, lists by mode and name, logs by itself: they are added there.
    """
    own, rows = vars(self).get("_stored_metrics"), self._rows_stored
    for name, value in metrics.items():
        if own is not None:
            own[train_eval][name].append(value)
            continue
        pair = Weighted(torch.as_tensor(rows * float(value)), torch.tensor(rows))
        self._sums[train_eval].add(name.removeprefix("eval_") if train_eval == "eval" else name, pair)


def tokenize_row(self: Any, feature: Mapping[str, Any], model: Any = None) -> dict[str, list[int]]:
    """A row of `prompt`, `chosen` and `rejected` as token ids and labels, cut as training rows are.

    `model` is not needed. Raises: what the preparation of a data set raises.
    """
    row, sets = Dataset.from_list([dict(feature)]), self._sets
    prepared, _ = sets.prepare(row, sets.processing_class, sets.settings, name="tokenize_row")
    return whole_sequences(prepared[0], is_encoder_decoder=self.is_encoder_decoder)


def build_tokenized_answer(self: Any, prompt: str, answer: str) -> dict[str, list[int]]:
    """Token ids of a prompt and of an answer to it, cut where the tokens of both together leave the prompt's."""
    texts = (prompt, prompt + answer)
    head, whole = (self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
    start = common_prefix_length(head, whole)
    ids = {"prompt_": whole[:start], "": whole[start:]}
    masks = {f"{name}attention_mask": [1] * len(part) for name, part in ids.items()}
    return {**{f"{name}input_ids": part for name, part in ids.items()}, **masks}


@contextmanager
def null_ref_context(self: Any) -> Iterator[Any]:
    """A block in which the policy is its own reference: its adapter is switched off, or the reference's on.

    Nothing changes inside where the reference is a model of its own, or there is none.
    """
    lends = isinstance(self.reference, AdapterReference)
    with self.reference.active(self.model) if lends else nullcontext(self.model) as model:
        yield model


def generate_from_model(self: Any, model: Any, batch: Mapping[str, Any]) -> list[str]:
    """Prompts with what the model makes of them, sampled up to `max_length` tokens, as text.

    `batch` has `prompt_input_ids` and `prompt_attention_mask`, `(B, P)`, padded on the left.
    """
    with self.accelerator.autocast(), torch.no_grad(), undisturbed(model):
        ids = model.generate(
            input_ids=batch["prompt_input_ids"],
            attention_mask=batch["prompt_attention_mask"],
            max_length=self.args.max_length,
            do_sample=True,
            pad_token_id=self.scorer.pad_token_id,
        )
    return self._tokenizer.batch_decode(ids, skip_special_tokens=True)


def generate_from_model_and_ref(self: Any, model: Any, batch: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """`generate_from_model` of the policy and of the reference.

    Raises: ValueError without a reference model.
    """
    if not hasattr(self.reference, "active"):
        raise ValueError(
            "there is no reference to generate with (reference_free or precompute_ref_log_probs). Set both to False."
        )
    if "prompt_input_ids" not in batch:
        batch = self.recorded_columns(self.take_batch(batch))
    with self.reference.active(self.model_wrapped) as reference:
        found = self.generate_from_model(reference, batch)
    return self.generate_from_model(model, batch), found


# ---- unpaired completions


def forward(
    self: Any, model: nn.Module, batch: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Log-probs of chosen and rejected completions, `(C,)` and `(R,)`, their logits `(C, T, V)` and `(R, T, V)`, and
    the log-probs `(B,)` of mismatched ones, without gradient (None where the loss has none).

    Raises: TypeError for an encoder-decoder.
    """
    batch = dict(self.take_batch(batch))
    scored, logits = _with_logits(self, "forward", model, self.method.learned(batch))
    logps = sum_by_sequence(scored.logps, scored.positions.sequence, row_count(batch))
    mismatched = self.method.mismatched_logps(batch, self.scoring(model, batch)) if self.mismatched else None
    chosen = batch["label"]
    return logps[chosen], logps[~chosen], logits[chosen], logits[~chosen], mismatched


def compute_reference_log_probs(self: Any, padded_batch: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """The reference's log-probs `(B,)` of a batch's completions and, for loss_type "kto", of its mismatched ones."""
    batch = self.take_batch(padded_batch)
    if "ref_logps" in batch:
        return batch["ref_logps"], batch.get("ref_kl_logps")
    logps = self.reference.score(self.model_wrapped, batch, self.completion_logps)
    logps = logps.view(-1, self.method.completions_per_row)
    return logps[:, 0], logps[:, 1] if self.mismatched else None


def unpaired_columns(self: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Prompts, and sequences of prompts and completions with labels, padded; `label` is a list of booleans."""
    step, found = self.method.completions_per_row, sequences_of(batch)
    rows: list[dict[str, Any]] = [{"label": bool(label)} for label in batch["label"]]
    for place, prefix in enumerate(("", "KL_")[:step]):
        for row, (prompt, answer) in zip(rows, found[place::step], strict=True):
            head = [] if self.is_encoder_decoder else prompt
            row[f"{prefix}prompt_input_ids"] = prompt
            row[f"{prefix}completion_input_ids"] = head + answer
            row[f"{prefix}completion_labels"] = [IGNORED] * len(head) + answer
    known = {column: batch[name] for column, name in REFERENCE_NAMES.items() if name in batch}
    return {**DPODataCollatorWithPadding(self.scorer.pad_token_id)(rows), **known}


def unpaired_outcome(self: Any, batch: dict[str, Any], scored: Scored) -> Outcome:
    """The outcome with losses and rewards of an overridden `kto_loss` or `bco_loss`."""
    scores = self.method.scores(batch, scored)
    kinds = scores.desirable, ~scores.desirable
    policy, reference = ([logps[kind] for kind in kinds] for logps in (scores.logps, scores.ref_logps))
    losses, chosen, rejected, point, *_ = self.call_loss_method(batch, policy, reference)
    if losses.numel() == len(scores.logps):
        order = torch.cat([kind.nonzero() for kind in kinds])[:, 0]  # the desirable ones came first
        losses = losses[order.argsort()]
    metrics = {"rewards/chosen": weighted(chosen), "rewards/rejected": weighted(rejected)}
    metrics[self._point] = weighted(torch.as_tensor(point).reshape(-1))
    metrics = unpaired_metrics(scores, self.args.beta) | metrics
    terms = LossTerms(scores.logps, torch.ones_like(scores.logps), "sequence", metrics)
    return self.method.outcome(with_losses(terms, losses), scores, scored)


def scores_by_kind(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> UnpairedScores:
    """The scores of desirable completions, `(C,)` log-probs of policy and reference, followed by the others, `(R,)`."""
    logps, ref_logps = torch.cat([chosen, rejected]), torch.cat([ref_chosen, ref_rejected])
    return UnpairedScores(logps, ref_logps, torch.arange(len(logps), device=logps.device) < len(chosen))


def rewards_by_kind(scores: UnpairedScores, beta: float) -> tuple[Tensor, Tensor]:
    """The implicit rewards of the desirable completions `(C,)` and of the others `(R,)`, without gradient."""
    rewards = (beta * scores.ratios).detach()
    return rewards[scores.desirable], rewards[~scores.desirable]
