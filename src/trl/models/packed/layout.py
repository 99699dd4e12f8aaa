"""Batches in the two layouts that models take: one packed row of segments, or padded rows.

Collators make either; support.py decides which a model takes. The scored positions and their sequences are computed
here, so that objectives do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trl.data.teacher_columns import TEACHER, TEACHER_COLUMNS
from trl.data.text import PROMPT_ALONE
from trl.models.packed.sequence_group import SharedRow
from trl.tensors.padding import IGNORED, flush_left
from trl.tensors.segments import Segments

Columns = Mapping[str, Any]
"""A batch: tensors by name (`teacher_batch` is a batch of its own)."""
Inputs = dict[str, Any]
"""Keyword arguments of a model's forward."""

STEP_PART = "part of the step"  # what a batch must know of its optimiser step
ROLLOUT = "experience"  # the rows of a batch of completions, an `Experience`
TEACHER_BATCH = "teacher_batch"  # that a teacher is shown in place of the student's
_SCORED = ("scored_source", "scored_target", "scored_sequence")
_NOT_OF_THE_MODEL = (  # all other entries of a batch are arguments of the model's forward
    # of the layout
    "input_ids", "attention_mask", "position_ids", "labels", "segment_table", *_SCORED, "filler", "completion_mask",
    "assistant_masks", "seq_lengths", "num_items_in_batch", "return_loss", STEP_PART, ROLLOUT,
    # of a method: numbers of each row or sequence, and what a teacher is shown
    "rows", "ref_logps", "ref_kl_logps", "margin", "label", "row_weights", "prompt_tokens", "on_policy", TEACHER,
    "embedding_input_ids", "embedding_attention_mask",
    *TEACHER_COLUMNS, TEACHER_BATCH, PROMPT_ALONE,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ScoredPositions:
    """Which hidden states predict which tokens: int64 `(K,)` each.

    `source` indexes the hidden states of the layout, flattened to `(tokens, H)`; `sequence` says to which sequence
    (row of a padded batch, segment of a packed one, branch of a shared prefix) the predicted token belongs.
    """

    source: Tensor
    target: Tensor
    sequence: Tensor


@dataclass(frozen=True, slots=True)
class ModelBatch:
    """The keyword arguments of a decoder's forward, and what to score of its hidden states."""

    inputs: Inputs
    scored: ScoredPositions
    real_tokens: Tensor  # int64 (tokens,): positions, flattened, that hold real tokens
    sequence_lengths: Tensor  # int64 (tokens,): length of each flattened position's sequence (0: padding)
    sequence_ends: Tensor  # int64 (S,): flattened position of the last token of each sequence
    prompts: Tensor | None = None  # int64 (S,): the prompt of each of an encoder-decoder's completions
    shared: SharedRow | None = None  # the row of which this is one process's piece

    @property
    def width(self) -> int:
        """The number of tokens of a row, T; of an encoder-decoder of a completion."""
        return self.inputs.get("decoder_input_ids", self.inputs["input_ids"]).shape[1]


def is_packed(batch: Columns) -> bool:
    """Whether a batch is one packed row: it has `position_ids` or a segment table, and no attention mask."""
    return "attention_mask" not in batch and ("position_ids" in batch or "segment_table" in batch)


def scored_sequences(batch: Columns) -> Tensor:
    """Which sequence each trained token belongs to, int64 `(K,)`: row, segment or branch, counted from 0."""
    if "scored_sequence" in batch:
        return batch["scored_sequence"]
    if "decoder_labels" in batch:
        return (batch["decoder_labels"] != IGNORED).nonzero()[:, 0]
    labels, positions = batch["labels"], None
    if is_packed(batch):
        positions = batch["position_ids"] if "position_ids" in batch else _segments(batch).position_ids()
        positions = positions.to(labels.device)
        sequence = (positions == 0).cumsum(dim=1) - 1
    else:
        sequence = torch.arange(len(labels), device=labels.device)[:, None].expand(labels.shape)
    return _positions(labels, sequence, batch.get("attention_mask"), positions).sequence


def row_count(batch: Columns, *, per_row: int = 1) -> int:
    """The number of rows of a batch; padded batches without `rows` have `per_row` sequences per row."""
    return len(batch["rows"]) if "rows" in batch else batch["input_ids"].shape[0] // per_row


def count_tokens(batch: Columns, *, of_sequences: bool = False) -> Tensor:
    """Number of real tokens of a batch as an int64 scalar; of an encoder-decoder's, prompts and completions.

    `of_sequences`: a shared prompt counts once for each of its branches.
    """
    if "decoder_labels" in batch:
        return batch["attention_mask"].sum() + (batch["decoder_labels"] != IGNORED).sum()
    if "attention_mask" in batch:
        return batch["attention_mask"].sum()
    tokens = torch.tensor(batch["input_ids"].numel())
    if of_sequences and "segment_table" in batch:
        segments = _segments(batch)
        tokens = (segments.length + segments.prefix_length)[segments.leaves].sum()
    tokens = tokens.to(batch["input_ids"].device)
    return tokens - batch["filler"].sum() if "filler" in batch else tokens


def _without_filler(batch: Columns) -> Inputs:
    """A packed row without the tokens at its end that only round its length up."""
    cut = {name: value for name, value in batch.items() if name != "filler"}
    if "filler" not in batch:
        return cut
    shape = batch["input_ids"].shape
    end = shape[1] - int(batch["filler"].sum())
    for name, value in cut.items():
        if name == "segment_table":
            cut[name] = value[:, :, value[0, 0, :, 0] < end]
        elif name in _SCORED:
            cut[name] = value[batch["scored_source"] < end]
        elif isinstance(value, Tensor) and value.shape[:2] == shape:
            cut[name] = value[:, :end]
    return cut


def packed_batch(batch: Columns, *, with_table: bool, shifted: bool = True) -> ModelBatch:
    """The batch as one packed row of real tokens, `input_ids (1, N)`.

    `with_table` adds the segment table as the attention mask (`packed_attention` reads it); without it the model's
    own variable-length attention finds the segments from `position_ids`. Labels are `shifted` where they are tokens
    that the token before predicts; classes of tokens are not.
    """
    if is_packed(batch):
        input_ids, labels = batch["input_ids"], batch.get("labels")
        segments = _segments(batch)
    else:
        labels, mask = batch.get("labels"), _row_mask(batch)
        real_tokens = mask.flatten().nonzero()[:, 0]
        if not len(real_tokens):
            raise ValueError("attention_mask must keep a token, got zeros alone. Leave out empty rows.")
        segments = Segments.from_lengths(length for length in mask.sum(dim=1).tolist() if length)
        labels = None if labels is None else labels.flatten()[real_tokens][None]
        input_ids = batch["input_ids"].flatten()[real_tokens][None]
    device = input_ids.device
    positions = segments.position_ids().to(device)
    inputs = {"input_ids": input_ids, "position_ids": positions, **model_arguments(batch)}
    if with_table:
        inputs["attention_mask"] = segments.table
    branches, real = segments.length, int(count_tokens(batch))
    lengths = branches + segments.prefix_length
    # Sequences are counted as `padded_rows` makes rows: a prompt counts as part of its first branch.
    leaves = torch.tensor(segments.leaves, device="cpu")
    ends = (segments.start + branches)[leaves] - 1
    numbers = torch.searchsorted(leaves, torch.arange(len(branches), device="cpu"))
    sequence = torch.repeat_interleave(numbers, branches).to(device).view(1, -1)
    if not shifted:
        scored = labelled_positions(labels, sequence)
    elif "scored_source" in batch:
        scored = ScoredPositions(*(batch[name] for name in _SCORED))
    else:
        scored = _positions(labels, sequence, positions=positions)
    return ModelBatch(
        inputs=inputs,
        scored=scored,
        real_tokens=torch.arange(real, device=device),
        sequence_lengths=torch.repeat_interleave(lengths, branches).to(device),
        sequence_ends=ends[ends < real].to(device),  # filler ends none
    )


def padded_batch(batch: Columns, *, pad_token_id: int, shifted: bool = True) -> ModelBatch:
    """The batch as rows padded on the right, `input_ids (B, T)`; a packed row is cut into its sequences.

    Labels are `shifted` as in `packed_batch`.
    """
    if not is_packed(batch):
        batch = _padded_on_the_right(batch)
    extras, batch = model_arguments(batch), padded_rows(batch, pad_token_id=pad_token_id)
    input_ids, mask = batch["input_ids"], batch["attention_mask"]
    rows, width = input_ids.shape
    sequence = torch.arange(rows, device=input_ids.device)[:, None].expand(rows, width)
    inputs = {"input_ids": input_ids, "attention_mask": mask, **extras}
    labels, lengths = batch.get("labels"), mask.sum(dim=1)
    return ModelBatch(
        inputs=inputs,
        scored=_positions(labels, sequence, mask) if shifted else labelled_positions(labels, sequence, mask),
        real_tokens=mask.flatten().nonzero()[:, 0], sequence_lengths=(lengths[:, None] * mask).flatten(),
        sequence_ends=torch.arange(rows, device=mask.device) * width + lengths - 1,
    )  # fmt: skip


def model_arguments(batch: Columns) -> Inputs:
    """The entries of a batch that are given to the model as they are, beside its tokens (images, for example)."""
    return {name: x for name, x in batch.items() if name not in _NOT_OF_THE_MODEL and x is not None}


def _segments(batch: Columns) -> Segments:
    if "segment_table" in batch:
        return Segments(batch["segment_table"])
    positions = batch["position_ids"]
    if positions.ndim != 2 or positions.shape[0] != 1:
        raise ValueError(f"position_ids of a packed batch must be (1, N), got {tuple(positions.shape)}.")
    starts = [*(positions[0] == 0).nonzero()[:, 0].tolist(), positions.shape[1]]
    if starts[0] != 0:
        raise ValueError(f"position_ids of a packed batch must start at 0, got {positions[0, :8].tolist()}.")
    return Segments.from_lengths(end - start for start, end in pairwise(starts))


def _row_mask(batch: Columns) -> Tensor:
    """The attention mask of padded rows: one run of ones in each, with positions that count from its start.

    Raises: ValueError for a mask with holes, and for `position_ids` that say something else (packed rows).
    """
    mask = batch.get("attention_mask")
    if mask is None:
        return torch.ones_like(batch["input_ids"])
    mask = mask.to(torch.int64)
    if (mask.diff(dim=1, prepend=mask.new_zeros(len(mask), 1)) > 0).sum(dim=1).gt(1).any():
        raise ValueError("attention_mask must have one run of ones per row, got a hole. Use labels of -100.")
    positions = batch.get("position_ids")
    if positions is not None and positions.ndim == 2 and ((positions != mask.cumsum(dim=1) - 1) & mask.bool()).any():
        raise ValueError("position_ids must count real tokens beside an attention_mask. Leave one out.")
    return mask


def _padded_on_the_right(batch: Columns) -> Inputs:
    """Padded rows with the padding on the left moved to the right, in every tensor `(B, T)` of the batch."""
    mask = _row_mask(batch)
    rows = {**batch, "attention_mask": mask}
    if mask[:, :1].all():
        return rows
    names = [name for name, value in rows.items() if isinstance(value, Tensor) and value.shape == mask.shape]
    return {**rows, **dict(zip(names, flush_left(mask, *(rows[name] for name in names))[1:], strict=True))}


def without_shared_prefixes(batch: Columns, *, pad_token_id: int) -> Columns:
    """A packed row with shared prefixes as padded rows, each with its own copy of the prompt; others as they are."""
    if "segment_table" not in batch or not _segments(batch).prefix_length.any():
        return batch
    return {**model_arguments(batch), **padded_rows(batch, pad_token_id=pad_token_id)}


def padded_rows(batch: Columns, *, pad_token_id: int) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask` and `labels` `(B, T)` of a batch of either layout.

    The sequences of a packed row become rows padded on the right, a branch its prompt and itself. Labels of a prompt
    stand in the row of its first branch.
    """
    if not is_packed(batch):
        rows, names = _padded_on_the_right(batch), ("input_ids", "attention_mask", "labels")
        return {name: rows[name] for name in names if rows.get(name) is not None}
    batch = _without_filler(batch)
    tokens, segments = batch["input_ids"][0], _segments(batch)
    labels = torch.full_like(tokens, IGNORED) if batch.get("labels") is None else batch["labels"][0]
    ids, targets, labelled = [], [], set()
    for start, length, prefix_start, prefix in (segments.rows[number] for number in segments.leaves):
        prompt, branch = slice(prefix_start, prefix_start + prefix), slice(start, start + length)
        of_prompt = torch.full_like(tokens[prompt], IGNORED) if prefix_start in labelled else labels[prompt]
        ids.append(torch.cat([tokens[prompt], tokens[branch]]))
        targets.append(torch.cat([of_prompt, labels[branch]]))
        labelled.update([prefix_start] if prefix else [])
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad_token_id),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad_sequence(targets, batch_first=True, padding_value=IGNORED),
    }


def labelled_positions(labels: Tensor | None, sequence: Tensor, mask: Tensor | None = None) -> ScoredPositions:
    """Real positions that have a label of their own, as classes of tokens or a decoder's labels are: all `(B, T)`."""
    if labels is None:
        return _positions(None, sequence)
    labelled = labels.ne(IGNORED) if mask is None else labels.ne(IGNORED) & mask.bool()
    source = labelled.flatten().nonzero()[:, 0]
    return ScoredPositions(source, labels.flatten()[source], sequence.flatten()[source])


def _positions(
    labels: Tensor | None, sequence: Tensor, mask: Tensor | None = None, positions: Tensor | None = None
) -> ScoredPositions:
    """Positions whose next label is trained, and predicted by a real token of its own sequence: all `(B, T)`.

    Neither padding (`mask` 0) nor, in a packed row, a sequence's first token (`positions` 0) is predicted.
    """
    if labels is None:
        empty = torch.empty(0, dtype=torch.int64, device=sequence.device)
        return ScoredPositions(empty, empty, empty)
    predicted = labels[:, 1:].ne(IGNORED)
    if mask is not None:
        predicted = predicted & mask[:, :-1].bool() & mask[:, 1:].bool()
    if positions is not None:
        predicted = predicted & positions[:, 1:].ne(0)
    row, column = predicted.nonzero(as_tuple=True)
    return ScoredPositions(row * labels.shape[1] + column, labels[row, column + 1], sequence[row, column + 1])
