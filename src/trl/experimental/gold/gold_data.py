"""Rows and batches for two tokenizers: each completion as tokens of both, and the spans that they have in common."""

import logging
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset, concatenate_datasets
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trl.collators.rows import Row, as_ids, pad_with_mask, read_column
from trl.data.byte_alignment import STOP, Alignment, align, shared_tokens, vocabulary_bytes
from trl.data.formats import StoredOrStream, column_names, last_turn_as_completion
from trl.data.pipeline import prepare_dataset
from trl.data.prepared_sets import RowSet
from trl.data.ragged import read_ragged, table_blocks
from trl.data.text import PROMPT_ALONE, SFTPreparation
from trl.data.tokenization import encode
from trl.experimental.gold.gold_config import GOLDConfig
from trl.models.packed.layout import IGNORED, TEACHER_BATCH
from trl.objectives.cross_vocabulary import Vocabularies
from trl.trainer.gkd_trainer import GKDSets, prompts_of

logger = logging.getLogger(__name__)

THEIRS = "teacher_"
"""Begins the names of the teacher's columns; those of the student have their usual names."""
COLUMNS = tuple(f"{side}{name}" for side in ("", THEIRS) for name in ("input_ids", "completion_mask", "spans"))
PROMPTS_ALONE = (PROMPT_ALONE, f"{THEIRS}{PROMPT_ALONE}")


@dataclass(frozen=True)
class Pairing:
    """Aligns tokens of two tokenizers: by bytes, or (`extended=False`) by number. `stops`: end tokens count."""

    tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]
    known: tuple[list[bytes], list[bytes]]
    extended: bool = True
    stops: bool = False

    @classmethod
    def of(cls, student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, args: GOLDConfig) -> "Pairing":
        """Raises: ValueError for a tokenizer whose tokens do not join to their text."""
        known = vocabulary_bytes(student), vocabulary_bytes(teacher)
        for tokenizer, tokens in zip((student, teacher), known, strict=True):
            if tokenizer.eos_token_id is not None:
                tokens[int(tokenizer.eos_token_id)] = STOP  # type: ignore[arg-type]
        stops = not (args.uld_skip_student_eos or args.uld_skip_teacher_eos)
        return cls((student, teacher), known, args.use_extended_uld, stops)

    def vocabularies(self, sizes: tuple[int, int]) -> Vocabularies:
        """The tokens that models of so many logits share, and the others; equal tokenizers share all ids in order."""
        if self.known[0] == self.known[1]:
            shared = [list(range(min(sizes)))] * 2
        else:
            shared = list(shared_tokens(*self.known))
        ids = [torch.tensor(tokens, dtype=torch.int64) for tokens in shared]
        rest = [
            torch.ones(size).index_fill(0, known_ids, 0).nonzero()[:, 0]
            for size, known_ids in zip(sizes, ids, strict=True)
        ]
        return Vocabularies(*ids, *rest)

    def spans(
        self, ids_of_student: Sequence[int], ids_of_teacher: Sequence[int], texts: Sequence[str] | None = None
    ) -> Alignment:
        """The spans of two token rows, within `texts` where the rows differ."""
        sides = [
            [known[token] for token in ids]
            for known, ids in zip(self.known, (ids_of_student, ids_of_teacher), strict=True)
        ]
        if self.extended:
            wholes = [b"".join(side) for side in sides]
            pieces = [text.encode() for text in texts or ()]
            pieces = [text if all(text in whole for whole in wholes) else text.strip() for text in pieces]
            within = None if texts is None else [text for text in pieces if text]
            return align(sides[0], sides[1], within, stops=self.stops)
        lengths = [len(side) - (not self.stops and side[-1:] == [STOP]) for side in sides]
        numbers = [np.where(np.arange(len(side)) < min(lengths), np.arange(len(side)), -1) for side in sides]
        return Alignment(*numbers, count=min(lengths))

    def row(self, student: Row, teacher: Row, texts: Sequence[str] | None) -> dict[str, object]:
        """A row of `COLUMNS`: the spans of the two sides' completions, 0 for tokens in none.

        A row's first token, which nothing predicts, is in none.
        """
        rows = [(list(side["input_ids"]), list(side["completion_mask"])) for side in (student, teacher)]
        starts = [mask.index(1) if 1 in mask else len(mask) for _, mask in rows]
        completions = [ids[start:] for (ids, _), start in zip(rows, starts, strict=True)]
        alignment = self.spans(completions[0], completions[1], texts)
        spans = [
            np.concatenate([np.full(start, -1), numbers]) for start, numbers in zip(starts, alignment[:2], strict=True)
        ]
        unpredicted = [numbers[0] for numbers in spans if len(numbers)]
        spans = [np.where(np.isin(numbers, unpredicted), 0, numbers + 1).tolist() for numbers in spans]
        return {
            f"{side}{name}": column
            for side, (ids, mask), numbers in zip(("", THEIRS), rows, spans, strict=True)
            for name, column in (("input_ids", ids), ("completion_mask", mask), ("spans", numbers))
        }

    def translated(self, ids: Sequence[int], *, to_teacher: bool, ended: bool) -> tuple[list[int], list[str]]:
        """A completion as tokens of the other side, with an end token if it `ended`, and the texts of both sides.

        The other side reads U+FFFD for what is no text, but nothing for a last character that is not finished.
        """
        known, target = self.known[not to_teacher], self.tokenizers[to_teacher]
        whole = b"".join(known[token] for token in (ids[:-1] if ended else ids))
        text = getincrementaldecoder("utf-8")("replace").decode(whole, final=ended)
        end: Any = [target.eos_token_id] if ended and target.eos_token_id is not None else []
        return [*encode(target, [text])[0], *end], text.split("\ufffd")

    def generated(self, batch: Row, completions: Sequence[Any], *, by_teacher: bool) -> list[dict[str, object]]:
        """The rows of a batch with other completions, of the student or the teacher."""
        rows = []
        prompts = zip(*map(prompts_of, (batch, batch[TEACHER_BATCH])), strict=True)
        for pair_of_prompts, completion in zip(prompts, completions, strict=True):
            ended = completion.finish_reason == "stop"
            translation, texts = self.translated(completion.ids, to_teacher=not by_teacher, ended=ended)
            pair = (translation, list(completion.ids)) if by_teacher else (list(completion.ids), translation)
            sides = [
                {"input_ids": [*prompt, *ids], "completion_mask": [0] * len(prompt) + [1] * len(ids)}
                for prompt, ids in zip(pair_of_prompts, pair, strict=True)
            ]
            rows.append(self.row(*sides, texts=texts))
        return rows


@dataclass(frozen=True)
class PairedCollator:
    """Rows of `COLUMNS` as a batch of padded tensors `(B, T)`, with the teacher's `(B, T')` as its `teacher_batch`."""

    pads: tuple[int, int]
    multiple: int | None = None

    def __call__(self, rows: Sequence[Row]) -> dict[str, object]:
        student, teacher = (self._side(rows, *side) for side in zip(("", THEIRS), self.pads, strict=True))
        return {**student, TEACHER_BATCH: teacher}

    def _side(self, rows: Sequence[Row], name: str, pad: int) -> dict[str, Tensor]:
        ids, masks, spans = (
            [as_ids(row[f"{name}{column}"]) for row in rows] for column in ("input_ids", "completion_mask", "spans")
        )
        labels = [row.where(mask == 1, IGNORED) for row, mask in zip(ids, masks, strict=True)]
        padded, mask = pad_with_mask(ids, pad, multiple=self.multiple)
        alone = read_column(rows, f"{name}{PROMPT_ALONE}")
        return {
            **({} if alone is None else {PROMPT_ALONE: pad_with_mask(alone, IGNORED)[0]}),
            "input_ids": padded,
            "attention_mask": mask,
            "labels": pad_with_mask(labels, IGNORED, multiple=self.multiple)[0],
            "spans": pad_with_mask(spans, 0, multiple=self.multiple)[0],
        }


def aligned_row(row: Row, pairing: Pairing, text_field: str) -> dict[str, object]:
    """A row with the tokens of both sides as one of `COLUMNS`."""
    sides = [
        {
            "input_ids": row[f"{name}input_ids"],
            "completion_mask": row.get(f"{name}completion_mask") or [1] * len(row[f"{name}input_ids"]),
        }
        for name in ("", THEIRS)
    ]
    return pairing.row(*sides, texts=_texts(row, text_field))


def _texts(row: Row, text_field: str) -> list[str]:
    """The texts of a row that its completion consists of: without what chat templates add."""
    completion = next(row[name] for name in ("completion", text_field, "messages") if row.get(name) is not None)
    if isinstance(completion, str):
        return [completion]
    contents = [message.get("content") for message in completion if message["role"] == "assistant"]
    return [content for content in contents if isinstance(content, str)]


class GOLDSets(GKDSets):
    """Each row tokenised for both sides, with the chat template of each, and aligned."""

    pairing: Pairing

    def is_prepared(self, dataset: StoredOrStream) -> bool:
        return super().is_prepared(dataset) or set(COLUMNS) <= set(column_names(dataset))

    def prepared(self, dataset: RowSet, name: str, *, is_training: bool = False) -> Dataset:
        if not isinstance(dataset, Dataset) or "input_ids" in dataset.column_names:
            raise ValueError(
                f"{name} dataset: a stream, or rows of tokens, were given with use_uld_loss=True, expected a "
                "datasets.Dataset of texts or messages, which both tokenizers read. Load it without streaming, before "
                "it is tokenised."
            )
        rows, student = last_turn_as_completion(dataset), super().prepared(dataset, name, is_training=is_training)
        assert isinstance(rows, Dataset) and isinstance(student, Dataset)
        settings = SFTPreparation(
            text_field=self.settings.text_field,
            completion_only_loss=self.settings.completion_only_loss,
            num_proc=self.settings.num_proc,
            prompts_alone=self.settings.prompts_alone,
        )
        with PartialState().main_process_first():
            theirs, _ = prepare_dataset(rows, self.pairing.tokenizers[1], settings, name=f"teacher's {name}")
            theirs = theirs.rename_columns({column: f"{THEIRS}{column}" for column in theirs.column_names})
            every = concatenate_datasets([rows, student, theirs], axis=1)
            removed = [column for column in every.column_names if column not in (*COLUMNS, *PROMPTS_ALONE)]
            aligned = every.map(
                aligned_row,
                fn_kwargs={"pairing": self.pairing, "text_field": settings.text_field},
                remove_columns=removed,
                num_proc=settings.num_proc,
                desc=f"Aligning {name} dataset",
            )
        _report(aligned, name)
        return aligned


def _report(dataset: Dataset, name: str) -> None:
    """Warn of rows without a span. Raises: ValueError where no row has one."""
    counts = []
    for block in table_blocks(dataset):
        spans = read_ragged(block["spans"], "spans")
        counts.append(np.diff(np.concatenate([[0], np.cumsum(spans.values > 0)])[spans.offsets]))
    empty = np.flatnonzero(np.concatenate(counts) == 0).tolist()
    if len(empty) == len(dataset):
        raise ValueError(
            f"{name} dataset: no row has a span of tokens that student and teacher read alike, expected the same text "
            "on both sides. Check that both chat templates write the messages unchanged, or raise max_length."
        )
    if empty:
        logger.warning(
            "%s dataset: in %d of %d rows (first: %s) no span of tokens is the same text for student and teacher; "
            "they are not trained. Check both chat templates, or raise max_length.",
            name, len(empty), len(dataset), empty[:3],
        )  # fmt: skip
