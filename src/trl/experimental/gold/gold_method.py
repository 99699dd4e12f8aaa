"""The mathematics of GOLD: the loss of spans of tokens of two tokenizers, in chunks of whole spans."""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trl.data.byte_alignment import shared_tokens
from trl.experimental.gold.gold_config import GOLDConfig
from trl.experimental.gold.gold_data import Pairing
from trl.methods.gkd import GKDMethod
from trl.methods.method import Batch, Outcome, Scoring, Step
from trl.methods.sft import TextScores
from trl.models.packed.layout import IGNORED, TEACHER_BATCH
from trl.objectives.cross_vocabulary import Vocabularies, cross_vocabulary, span_measures
from trl.tensors import heads
from trl.tensors.reduce import LossTerms, Unit, weighted
from trl.tensors.statistics import selective_log_softmax
from trl.tensors.vocabulary_loss import VocabularyLoss

ON_POLICY = "on_policy"
"""The entry of a batch with completions of the student."""
TOKEN_WEIGHT = "token_weight"
"""The entry of a batch with the step's number of spans over that of its tokens."""


class Spans(NamedTuple):
    """Scored tokens of one side in order, `(K,)` each: the token, whether it begins a span, whether it is in one."""

    targets: Tensor
    first: Tensor
    inside: Tensor

    def part(self, rows: slice) -> "Spans":
        """Those of some rows."""
        return Spans(*(column[rows] for column in self))


def scored_spans(rows: Mapping[str, Tensor], spans: Tensor) -> Spans:
    """The scored tokens of rows whose tokens have the numbers `spans (B, T)`, 0 for none."""
    scored = rows["labels"] != IGNORED
    row = torch.arange(len(spans), device=spans.device)[:, None] * (spans.amax() + 1)
    inside, numbers = spans[scored] > 0, (spans + row)[scored]
    is_new = torch.ones_like(inside)
    is_new[1:] = numbers[1:] != numbers[:-1]
    return Spans(rows["labels"][scored], inside & is_new, inside)


def chunks_of_spans(student: Spans, teacher: Spans, size: int) -> list[tuple[slice, slice]]:
    """Slices of both sides' tokens, in whole spans of together at most `size` tokens, unless a span is longer.

    All tokens of `teacher` are in spans, as many as those of `student`, in one order.
    """
    first, inside = student.first.cpu().numpy(), student.inside.cpu().numpy()
    begins = np.flatnonzero(first | ~inside)  # of a span, or of a token in none
    of_spans = np.append(teacher.first.nonzero()[:, 0].cpu().numpy(), len(teacher.first))
    theirs = of_spans[np.cumsum(first)[begins] - first[begins]]
    ends, their_ends = np.append(begins[1:], len(first)), np.append(theirs[1:], len(teacher.first))
    chunks, start = [], 0
    for unit in range(1, len(begins) + 1):
        if unit == len(begins) or max(ends[unit] - begins[start], their_ends[unit] - theirs[start]) > size:
            last = unit - 1
            chunks.append((slice(begins[start], ends[last]), slice(theirs[start], their_ends[last])))
            start = unit
    return chunks


def by_policy(outcome: Outcome, batch: Batch) -> Outcome:
    """With the mean loss of completions of the student, or of others."""
    first, *rest = outcome.terms
    name = "on_policy_loss" if ON_POLICY in batch else "off_policy_loss"
    metrics = {**first.metrics, name: weighted(first.values)}
    return outcome._replace(terms=[first._replace(metrics=metrics), *rest])


class SameTokensMethod(GKDMethod):
    """GKD with the mean losses of completions of the student, and of others."""

    def terms(self, batch: Batch, scored: TextScores, step: Step) -> Outcome:
        outcome = super().terms(batch, scored, step)
        return by_policy(outcome, batch) if step.training else outcome


class GOLDMethod(GKDMethod):
    """The distance from the teacher over spans of tokens with the same bytes, and the cross-entropy."""

    units: ClassVar[tuple[Unit, ...]] = ("group", "token")
    args: GOLDConfig

    def __init__(self, args: GOLDConfig, pairing: Pairing, sizes: tuple[int, int]) -> None:
        super().__init__(args)
        self.sizes, (_, theirs) = sizes, pairing.known
        share = len(shared_tokens(*pairing.known)[0]) / len({*theirs} - {b""})  # of the teacher's tokens
        self.vocabularies = pairing.vocabularies(sizes) if args.uld_use_hybrid_loss else None
        weights = args.uld_hybrid_matched_weight, args.uld_hybrid_unmatched_weight
        self.weights: Any = (share, 1 - share) if None in weights else weights

    def sides(self, batch: Batch) -> list[dict[str, Tensor]]:
        """The student's and the teacher's rows, with labels of tokens in spans (of all for cross-entropy)."""
        sides = []
        for rows in (batch, batch[TEACHER_BATCH]):
            kept = rows["spans"] > 0
            if rows is batch and self.args.uld_crossentropy_weight:
                kept |= rows["labels"] != IGNORED
            kept[:, 0] = False  # nothing predicts a first token
            inputs = {name: rows[name] for name in ("input_ids", "attention_mask")}
            sides.append({**inputs, "labels": rows["labels"].where(kept, IGNORED)})
        return sides

    def count(self, batch: Batch) -> Tensor:
        """Spans, and scored tokens."""
        first = scored_spans(self.sides(batch)[0], batch["spans"]).first
        return torch.stack([first.sum(), torch.tensor(len(first), device=first.device)])

    def learned(self, batch: Batch) -> Batch:
        """The student's rows."""
        return {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}

    def divergence(self, batch: Batch, scoring: Scoring) -> VocabularyLoss:
        """The distances of spans; tokens weigh as much as the step's numbers of spans and tokens say."""
        counts, teacher = scoring.step.counts, scoring.teacher
        if counts is not None and self.args.uld_crossentropy_weight:
            batch = {**batch, TOKEN_WEIGHT: int(counts[0]) / int(counts[1])}
        loss = SpanLoss(self, batch)
        assert teacher is not None
        reads = teacher.reads(scoring.model, {**loss.rows[0], TEACHER_BATCH: loss.rows[1]})
        with scoring.accelerator.autocast():
            return scoring.scorer.over_chunks(scoring.model, loss.rows[0], loss, parts=loss.parts, **reads)

    def terms(self, batch: Batch, scored: TextScores, step: Step) -> Outcome:
        """The distance of each span, and the cross-entropy of each token."""
        args, first = self.args, scored_spans(self.sides(batch)[0], batch["spans"]).first
        loss: VocabularyLoss = scored.tokens
        assert loss.statistics is not None
        nll, distance, matched, unmatched = loss.statistics.unbind(1)
        metrics = {}
        if self.vocabularies is not None:
            metrics = {"matched_loss": weighted(matched[first]), "unmatched_loss": weighted(unmatched[first])}
        distance, nll = args.uld_distillation_weight * distance[first], args.uld_crossentropy_weight * nll
        terms = [
            LossTerms(distance, torch.ones_like(distance), "group", metrics),
            LossTerms(nll, torch.ones_like(nll), "token", {}),
        ]
        # An evaluation divides each by its own number: its batches have no common weight of a token.
        local = loss.total if step.training else None
        outcome = Outcome(terms, scored.logits, scored.labels, loss.aux_loss, local=local)
        return by_policy(outcome, batch) if step.training else outcome


class SpanLoss:
    """The loss of a batch's chunks, for `over_chunks`, and the `parts` of both sides' `rows` that they are."""

    def __init__(self, method: GOLDMethod, batch: Batch, size: int | None = None) -> None:
        self.method, self.rows = method, method.sides(batch)
        self.student, self.teacher = (
            scored_spans(rows, side["spans"])
            for rows, side in zip(self.rows, (batch, batch[TEACHER_BATCH]), strict=True)
        )
        device = self.student.first.device
        size = size or heads.default_chunk_size(max(method.sizes), itemsize=4, device=device)
        self.parts = chunks_of_spans(self.student, self.teacher, size)
        ids = method.vocabularies
        self._vocabularies = None if ids is None else Vocabularies(*(column.to(device) for column in ids))
        self._places = {student.start: teacher for student, teacher in self.parts}
        self._token_weight = batch.get(TOKEN_WEIGHT, 1.0) * method.args.uld_crossentropy_weight

    def __call__(self, logits: Tensor, other: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """`(C, V), (C', V') -> (C,), (C, 4)`: the loss of a span is that of its first token.

        Statistics: each token's cross-entropy, and at first tokens the distance and its matched and unmatched part.
        """
        args, method = self.method.args, self.method
        student, teacher = self.student.part(rows), self.teacher.part(self._places.get(rows.start, rows))
        matched, distance = cross_vocabulary(
            span_measures(logits / args.uld_student_temperature, *student),
            span_measures(other / args.uld_teacher_temperature, *teacher),
            self._vocabularies,
            beta=args.beta,
        )
        parts = (distance, distance) if matched is None else (matched, distance)
        if matched is not None:
            distance = method.weights[0] * matched + method.weights[1] * distance
        values = [distance.new_zeros(len(logits)).masked_scatter(student.first, x) for x in (distance, *parts)]
        nll = -selective_log_softmax(logits, student.targets) if self._token_weight else torch.zeros_like(values[0])
        loss = args.uld_distillation_weight * values[0] + self._token_weight * nll
        return loss, torch.stack([nll, *values], dim=1)
