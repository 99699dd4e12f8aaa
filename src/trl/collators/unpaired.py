"""Prompts with one labelled completion each, and for KTO a mismatched one, as one packed row."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trl.collators.preference import completion_batch, row_batch
from trl.collators.rows import Batch, Row, as_ids, check_columns, mask_of, pad_with_mask, real_tokens
from trl.data.formats import RowDict
from trl.data.unpaired import EMBEDDING_COLUMN, KL_COLUMNS, REFERENCE_LOGPS, TOKEN_COLUMNS
from trl.tensors.segments import Segments

UNPAIRED_COLUMNS = (*TOKEN_COLUMNS, "label")
EMBEDDING_MASK = "embedding_attention_mask"
MISMATCHED_COLUMN, OWN_PROMPT = KL_COLUMNS
REFERENCE_NAMES = dict(zip(REFERENCE_LOGPS, ("ref_logps", "ref_kl_logps"), strict=True))
"""Columns of the reference's log-probs, and their names in a batch."""


@dataclass
class UnpairedCollator:
    """Batches rows of `prompt_input_ids`, `completion_input_ids` and `label` as `row_batch` says.

    Sequence i is row i's completion; with `mismatched` that is sequence 2i, and 2i + 1 is the mismatched one, of the
    column `KL_completion_input_ids` (behind `KL_prompt_input_ids`, where a row has it). `label (B,)` is bool. Columns
    `reference_logps` and `reference_KL_logps` become `ref_logps` and `ref_kl_logps` `(B,)`; `embedding_input_ids`
    becomes a padded `(B, E)` with a mask.

    Args:
        prefix_sharing: Whether a row's two completions share one copy of their prompt.
        mismatched: Whether batches hold the mismatched completions too.
        encoder_pad: Token that fills padded positions of an encoder-decoder's prompts; None for a decoder.

    >>> row = {"prompt_input_ids": [5], "completion_input_ids": [6, 7], "KL_completion_input_ids": [8], "label": True}
    >>> batch = UnpairedCollator(mismatched=True)([row])
    >>> batch["labels"].tolist(), batch["label"].tolist()
    ([[-100, 6, 7, 8]], [True])
    """

    prefix_sharing: bool = True
    mismatched: bool = False
    encoder_pad: int | None = None

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        names, sharing = completion_columns(mismatched=self.mismatched), self.prefix_sharing
        batch = row_batch(rows, names, OWN_PROMPT, prefix_sharing=sharing, encoder_pad=self.encoder_pad)
        batch["label"] = torch.tensor([bool(row["label"]) for row in rows])
        for column, name in REFERENCE_NAMES.items():
            if rows[0].get(column) is not None:
                batch[name] = torch.tensor([float(row[column]) for row in rows], dtype=torch.float64)
        if rows[0].get(EMBEDDING_COLUMN) is not None:
            prompts = [as_ids(row[EMBEDDING_COLUMN]) for row in rows]
            batch[EMBEDDING_COLUMN], batch[EMBEDDING_MASK] = pad_with_mask(prompts, 0)
        return batch


def completion_columns(*, mismatched: bool) -> list[str]:
    return ["completion_input_ids", MISMATCHED_COLUMN] if mismatched else ["completion_input_ids"]


def single_completions(batch: Batch, number: int, *, of: int) -> RowDict:
    """The completion `number` (from 0) of every row, of a batch of rows with `of` completions each, as plain sequences.

    >>> row = {"prompt_input_ids": [5], "completion_input_ids": [6, 7], "KL_completion_input_ids": [8], "label": True}
    >>> single_completions(UnpairedCollator(mismatched=True)([row]), 1, of=2)["input_ids"].tolist()
    [[5, 8]]
    """
    if "decoder_labels" in batch:
        sides = {name: batch[name][number::of] for name in ("decoder_labels", "decoder_prompt")}
        return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], **sides}
    if "attention_mask" in batch:
        return {name: batch[name][number::of] for name in ("input_ids", "attention_mask", "labels")}
    tokens = _tokens_of(batch, number, of)
    return {name: batch[name][:, tokens] for name in ("input_ids", "position_ids", "labels")}


def _tokens_of(batch: Batch, number: int, of: int) -> Tensor:
    """The tokens of a packed row that belong to the completions `number` or their prompts: bool `(N,)`."""
    if "segment_table" not in batch:
        return ((batch["position_ids"][0] == 0).cumsum(dim=0) - 1) % of == number
    segments = Segments(batch["segment_table"])
    kept = segments.prefix_length.nonzero()[:, 0][number::of]
    stays = torch.isin(segments.start, segments.prefix_start[kept])
    stays[kept] = True
    return stays.repeat_interleave(segments.length).to(batch["input_ids"].device)


def as_unpaired_batch(batch: Batch, *, prefix_sharing: bool, mismatched: bool = False) -> Batch:
    """A batch in the form of `UnpairedCollator`, from any collator.

    Also accepted: `prompt_input_ids`, `completion_input_ids` (with `mismatched` also `KL_completion_input_ids`) with
    their `_attention_mask`, as from `DPODataCollatorWithPadding`; a completion may include its prompt if
    `completion_labels` are -100 on it. Raises ValueError for other batches.
    """
    if "rows" in batch and "label" in batch:
        return {**batch, "label": torch.as_tensor(batch["label"], device=batch["rows"].device)}
    names = ["prompt_input_ids", *completion_columns(mismatched=mismatched)]
    check_columns(batch, [*names, *map(mask_of, names), "label"])
    # labels, if given, are -100 on a prompt
    parts = [real_tokens(batch, x, labels=batch.get(x.replace("_input_ids", "_labels"))) for x in names]
    prompted = [(prompt, completions) for prompt, *completions in zip(*parts, strict=True)]
    packed = completion_batch(prompted, prefix_sharing=prefix_sharing)
    packed["label"] = torch.as_tensor(batch["label"]).bool()
    for column, name in REFERENCE_NAMES.items():
        if column in batch:
            packed[name] = torch.as_tensor(batch[column])
    device = batch["prompt_input_ids"].device
    return {name: value.to(device) for name, value in packed.items()}
