"""Training on answers only, found by the text that introduces them (0.4-0.19)."""

import re
import warnings
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.data.data_collator import DataCollatorMixin

from trl.collators.language_modelling import DataCollatorForLanguageModeling
from trl.collators.rows import IGNORED, as_ids, as_rows, round_up

Span = tuple[int, int]


class DataCollatorForCompletionOnlyLM(DataCollatorMixin):
    """Batches tokenized rows so that only what follows a response template is trained.

    Without `instruction_template` that is everything after the last response template of a row. With it, every stretch
    from the end of a response template to the next instruction template: all answers of a conversation.

    Templates are found as token ids. A template given as text may be tokenized differently where it stands in a row;
    then the row is decoded, the text is found in it, and the template is every token that holds a character of it (a
    token that also holds the first characters of the answer counts as template). A row in which a template is not
    found is not trained at all: a warning says so, and `rows_without_template` counts them.

    Batches are those of `DataCollatorForLanguageModeling`, padded (on the tokenizer's `padding_side`) or padding-free.
    Padding is told by position, so the pad token may be the end token. The tokenizer needs one only where rows are
    padded.

    Args:
        response_template: Text or token ids that introduce an answer.
        instruction_template: Text or token ids that introduce what is answered.
        mlm: Must be False; kept for the programs that pass it.
        ignore_index: Label of what is not trained.
        padding_free: Whether to lay all rows into one packed row.
        tokenizer: Tokenizer of the rows.
        pad_to_multiple_of: Rounds the length of a batch up to a multiple, in tokens.
    """

    def __init__(
        self, response_template: str | Sequence[int], instruction_template: str | Sequence[int] | None = None,
        *, tokenizer: PreTrainedTokenizerBase, mlm: bool = False, ignore_index: int = IGNORED,
        padding_free: bool = False, pad_to_multiple_of: int | None = None,
    ) -> None:  # fmt: skip
        if mlm:
            raise ValueError("mlm must be False, got True. Leave it out.")
        self.response_template = response_template
        self.instruction_template = instruction_template
        self.tokenizer = tokenizer
        self.ignore_index = ignore_index
        self.padding_free = padding_free
        self.return_tensors = "pt"
        self.rows_without_template = 0
        self._response = _Template(response_template, tokenizer, "response_template")
        self._instruction = (
            None if instruction_template is None else _Template(instruction_template, tokenizer, "instruction_template")
        )
        self._collate = DataCollatorForLanguageModeling(
            pad_token_id=0, padding_free=padding_free, pad_to_multiple_of=pad_to_multiple_of
        )

    def torch_call(self, examples: Sequence[object]) -> dict[str, Tensor]:
        """The batch of some lists of token ids, or rows with `input_ids` (and perhaps `attention_mask`).

        Raises: ValueError where rows are padded and the tokenizer has no pad token.
        """
        rows, missing = [], 0
        for row in as_rows(examples):
            ids, mask = as_ids(row["input_ids"]), row.get("attention_mask")
            ids = ids if mask is None else ids[as_ids(mask) != 0]
            trained = self._trained(ids.numpy())
            missing += trained is None
            kept = torch.zeros(len(ids), dtype=torch.bool) if trained is None else torch.from_numpy(trained)
            rows.append({"input_ids": ids, "labels": torch.where(kept, ids, IGNORED)})
        if missing:
            self.rows_without_template += missing
            templates = f"response_template {self.response_template!r}"
            if self.instruction_template is not None:
                templates += f" or instruction_template {self.instruction_template!r}"
            warnings.warn(f"{missing} of {len(rows)} rows without the {templates} are not trained.", stacklevel=2)
        self._set_padding([len(row["input_ids"]) for row in rows])
        batch = self._collate(rows)
        batch["labels"][batch["labels"] == IGNORED] = self.ignore_index
        return batch

    def _set_padding(self, lengths: list[int]) -> None:
        longest = round_up(max(lengths, default=0), self._collate.pad_to_multiple_of)
        pad = self.tokenizer.pad_token_id
        if pad is None and not self.padding_free and min(lengths, default=0) < longest:
            raise ValueError(f"rows of {min(lengths)} to {max(lengths)} tokens need tokenizer.pad_token.")
        self._collate.pad_token_id = pad or 0  # type: ignore[assignment]
        self._collate.padding_side = self.tokenizer.padding_side  # type: ignore[assignment]

    def _trained(self, ids: np.ndarray) -> np.ndarray | None:
        """The trained tokens `(T,)`: from a response template's end to the next instruction; None without one."""
        responses = self._response.find(ids)
        instructions = [] if self._instruction is None else self._instruction.find(ids)
        if not responses or (self._instruction is not None and not instructions):
            return None
        marks = [(start, False) for start, _ in instructions]  # of two at one place the instruction has the last word
        marks += [(end, True) for _, end in (responses if instructions else responses[-1:])]
        marks.sort(key=lambda mark: (mark[0], not mark[1]))
        trained = np.zeros(len(ids), dtype=bool)
        for place, is_answer in marks:
            trained[place:] = is_answer
        for start, end in responses:
            trained[start:end] = False
        return trained


class _Template:
    """A template and where it occurs in a row."""

    def __init__(self, template: str | Sequence[int], tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        self.tokenizer = tokenizer
        self.text = template if isinstance(template, str) else None
        ids = tokenizer.encode(template, add_special_tokens=False) if isinstance(template, str) else template
        self.ids = np.array(ids, dtype=np.int64)
        if not len(self.ids):
            raise ValueError(f"{name} must have at least one token, got {template!r}.")

    def find(self, ids: np.ndarray) -> list[Span]:
        """The token ranges `[start, end)` of all occurrences, in order."""
        size = len(self.ids)
        windows = np.lib.stride_tricks.sliding_window_view(ids, size) if len(ids) >= size else np.empty((0, size))
        spans = [(start, start + size) for start in np.flatnonzero((windows == self.ids).all(axis=1)).tolist()]
        if self.text is None or self._decode(ids, len(ids)).count(self.text) == len(spans):
            return spans
        return self._find_text(ids, self.text)

    def _find_text(self, ids: np.ndarray, text: str) -> list[Span]:
        """The tokens that hold a character of the text, at each of its places."""

        def tokens_within(characters: int) -> int:
            counts = range(len(ids) + 1)
            return bisect_right(counts, characters, key=lambda count: len(self._decode(ids, count))) - 1

        spans = []
        for match in re.finditer(re.escape(text), self._decode(ids, len(ids))):
            covered = tokens_within(match.end())
            is_exact = len(self._decode(ids, covered)) == match.end()
            spans.append((tokens_within(match.start()), covered if is_exact else covered + 1))
        return spans

    def _decode(self, ids: np.ndarray, count: int) -> str:
        text = self.tokenizer.decode(ids[:count].tolist(), clean_up_tokenization_spaces=False)
        return str(text)
