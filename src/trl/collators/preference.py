"""Prompts with their completions as one packed row, or padded for an encoder-decoder; pairs of other collators."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.data.data_collator import DataCollatorMixin

from trl.collators.rows import (
    IGNORED,
    Batch,
    Row,
    as_ids,
    check_columns,
    check_filled,
    mask_of,
    pack_sequences,
    pad_with_mask,
    real_tokens,
)
from trl.data.formats import RowDict
from trl.data.preference import OWN_PROMPT, REFERENCE_COLUMNS
from trl.data.preference_rows import PAIR_COLUMNS
from trl.tensors.padding import pad
from trl.tensors.segments import Segments

Prompted = tuple[Any, Sequence[Any]]
"""A prompt's token ids and those of its completions."""

_OF_IMAGES = {
    **dict.fromkeys(("pixel_values", "pixel_attention_mask", "image_sizes"), "right"),
    "token_type_ids": "left",
}


def completion_batch(
    rows: Sequence[Prompted], *, prefix_sharing: bool, unscored: Sequence[int] = ()
) -> dict[str, Tensor]:
    """Prompts and completions as one packed batch; its sequences are the completions, in order.

    With `prefix_sharing` each prompt occurs once, before its completions (`pack_prefix_groups`), otherwise once per
    completion. `labels (1, N)` are -100 on prompts, and on the first `unscored` tokens of each completion. `rows (B,)`
    counts the rows.

    Raises: ValueError for a prompt or completion without tokens.

    >>> completion_batch([([5, 6], [[7], [8, 9]])], prefix_sharing=False)["input_ids"].tolist()
    [[5, 6, 7, 5, 6, 8, 9]]
    """
    groups = pack_prefix_groups(rows, unscored)  # checks the rows too
    count = torch.arange(len(rows))  # first, where transformers looks for how many rows a batch has
    if prefix_sharing:
        return {"rows": count, **groups}
    ids, labels, lengths = [], [], []
    for prompt, completions in rows:
        prompt = as_ids(prompt)
        for completion in map(as_ids, completions):
            ids += [prompt, completion]
            labels += [torch.full_like(prompt, IGNORED), completion]
            lengths.append(len(prompt) + len(completion))
    return {"rows": count, **pack_sequences(torch.cat(ids), torch.cat(labels), lengths, pad_token_id=0)}


def pack_prefix_groups(rows: Sequence[Prompted], unscored: Sequence[int] = ()) -> dict[str, Tensor]:
    """Prompts, each followed by its completions, as one packed row of prefix groups.

    `labels (1, N)` are the completions' tokens without the first `unscored` of each, and -100 on the rest. A
    completion's first token is predicted by its prompt's last one, not by its left neighbour: `scored_source`,
    `scored_target` and `scored_sequence`, int64 `(K,)`, are the predicting position, the token and its completion.

    Raises: ValueError for a prompt or completion without tokens, or a row without completions.

    >>> packed = pack_prefix_groups([([5, 6], [[7, 8], [9]])])
    >>> packed["position_ids"].tolist(), packed["scored_source"].tolist(), packed["scored_target"].tolist()
    ([[0, 1, 2, 3, 2]], [1, 2, 1], [7, 8, 9])
    """
    groups = [(as_ids(prompt), [as_ids(branch) for branch in branches]) for prompt, branches in rows]
    check_filled([(prompt, *branches) for prompt, branches in groups])
    segments = Segments.from_prefix_groups([(len(prompt), [len(b) for b in branches]) for prompt, branches in groups])
    input_ids = torch.cat([part for prompt, branches in groups for part in (prompt, *branches)])
    table = segments.table
    start, length, prefix_start, prefix_length = table[0, 0][table[0, 0, :, 3] > 0].unbind(dim=1)
    branch = torch.repeat_interleave(torch.arange(len(start)), length)
    first = length.cumsum(0) - length  # where each branch begins among the scored tokens
    target = torch.arange(int(length.sum())) - (first - start)[branch]
    source = target - 1
    source[first] = prefix_start + prefix_length - 1
    if any(unscored):
        scored = target - start[branch] >= torch.tensor(unscored)[branch]
        source, target, branch = source[scored], target[scored], branch[scored]
    labels = torch.full_like(input_ids, IGNORED)
    labels[target] = input_ids[target]
    return {
        "input_ids": input_ids[None],
        "position_ids": segments.position_ids(),
        "labels": labels[None],
        "segment_table": table,
        "scored_source": source,
        "scored_target": input_ids[target],
        "scored_sequence": branch,
    }


def seq2seq_batch(
    rows: Sequence[Row], *, pad_token_id: int = 0, completions: Sequence[str] = PAIR_COLUMNS[1:]
) -> dict[str, Tensor]:
    """Prompts (`prompt_input_ids`) and the `completions` of each row for an encoder-decoder, side by side.

    `input_ids`, `attention_mask` `(B, P)`; `decoder_labels` `(S, T)`, -100 on padding; `decoder_prompt` `(S,)`, the row
    of each completion. Completions of one row follow one another: with pairs, completion 2i is row i's chosen one.

    Raises: ValueError naming the row where a prompt or completion has no tokens.

    >>> batch = seq2seq_batch([{"prompt_input_ids": [5, 6], "chosen_input_ids": [7, 1], "rejected_input_ids": [1]}])
    >>> batch["decoder_labels"].tolist(), batch["decoder_prompt"].tolist()
    ([[7, 1], [1, -100]], [0, 0])
    """
    check_filled([[row["prompt_input_ids"], *(row[name] for name in completions)] for row in rows])
    input_ids, mask = pad_with_mask([as_ids(row["prompt_input_ids"]) for row in rows], pad_token_id)
    return {
        "input_ids": input_ids,
        "attention_mask": mask,
        "decoder_labels": pad([as_ids(row[name]) for row in rows for name in completions], IGNORED),
        "decoder_prompt": torch.arange(len(rows)).repeat_interleave(len(completions)),
    }


def row_batch(
    rows: Sequence[Row], completions: Sequence[str], own_prompt: str, *, prefix_sharing: bool, encoder_pad: int | None
) -> dict[str, Tensor]:
    """Rows of prompts and one or two `completions` as `completion_batch`, with `encoder_pad` as `seq2seq_batch`.

    A row with a column `own_prompt`, that of its second completion, shares no prompt. `rows (B,)` counts the rows.
    """
    count = {"rows": torch.arange(len(rows))}
    if encoder_pad is not None:
        return {**count, **seq2seq_batch(rows, pad_token_id=encoder_pad, completions=completions)}
    prompted: list[Prompted] = []
    for row in rows:
        prompt, branches = row["prompt_input_ids"], [row[name] for name in completions]
        other = row.get(own_prompt) if len(branches) > 1 else None
        prompted += [(prompt, branches)] if other is None else [(prompt, branches[:1]), (other, branches[1:])]
    return {**completion_batch(prompted, prefix_sharing=prefix_sharing), **count}


@dataclass
class PairCollator:
    """Batches rows of `prompt_input_ids`, `chosen_input_ids` and `rejected_input_ids` as `row_batch` says.

    Sequence 2i is row i's chosen completion, 2i + 1 its rejected one. Truncation may have made the two prompts
    different: then a row has `rejected_prompt_input_ids`. Columns `ref_chosen_logps` and `ref_rejected_logps`, where
    the rows have them, become `ref_logps (2B,)` in that order.

    Args:
        prefix_sharing: Whether a pair's two completions share one copy of their prompt.
        encoder_pad: Token that fills padded positions of an encoder-decoder's prompts; None for a decoder.

    >>> rows = [{"prompt_input_ids": [5], "chosen_input_ids": [6, 7], "rejected_input_ids": [8]}]
    >>> PairCollator()(rows)["labels"].tolist()
    [[-100, 6, 7, 8]]
    """

    prefix_sharing: bool = True
    encoder_pad: int | None = None

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        sharing, encoder_pad = self.prefix_sharing, self.encoder_pad
        batch = row_batch(rows, PAIR_COLUMNS[1:], OWN_PROMPT, prefix_sharing=sharing, encoder_pad=encoder_pad)
        return {**batch, **reference_logps(rows)}


@dataclass
class Seq2SeqRowsCollator:
    """Batches rows of `input_ids` (for the encoder) and `labels` (for the decoder), as `seq2seq_batch` does."""

    pad_token_id: int = 0

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        named = [{"prompt_input_ids": row.get("input_ids"), "labels": row.get("labels")} for row in rows]
        return seq2seq_batch(named, pad_token_id=self.pad_token_id, completions=("labels",))


def reference_logps(rows: Sequence[Row]) -> dict[str, Tensor]:
    """`ref_logps (2B,)`, chosen and rejected in turn, where the rows have the reference's columns."""
    if rows[0].get(REFERENCE_COLUMNS[0]) is None:
        return {}
    values = [float(row[column]) for row in rows for column in REFERENCE_COLUMNS]
    return {"ref_logps": torch.tensor(values, dtype=torch.float64)}


@dataclass
class DPODataCollatorWithPadding:
    """Pads each column of tokenised pairs by itself (TRL 0.4-0.26).

    Columns that end in `_input_ids`, `_attention_mask` and `_labels` become tensors `(B, T)`, padded with
    `pad_token_id`, 0 and `label_pad_token_id`; those that begin with `prompt` on the left. A missing `_attention_mask`
    is added. Columns that end in `_logps` become tensors `(B,)`; others stay lists. `DPOTrainer` takes such batches
    too.

    Args:
        pad_token_id: Token that fills padded positions.
        label_pad_token_id: Label of padded positions.
        is_encoder_decoder: Has no effect; kept for compatibility.

    >>> DPODataCollatorWithPadding()([{"chosen_input_ids": [5, 6]}, {"chosen_input_ids": [7]}])["chosen_attention_mask"]
    tensor([[1, 1],
            [1, 0]])
    """

    pad_token_id: int = 0
    label_pad_token_id: int = IGNORED
    is_encoder_decoder: bool | None = False

    def __call__(self, features: Sequence[Row]) -> RowDict:
        fill = {"_input_ids": self.pad_token_id, "_attention_mask": 0, "_labels": self.label_pad_token_id}
        batch: RowDict = {}
        for name in features[0]:
            suffix = next((suffix for suffix in fill if name.endswith(suffix)), None)
            values = [feature[name] for feature in features]
            if suffix is not None:
                side = "left" if name.startswith("prompt") else "right"
                batch[name], mask = pad_with_mask([as_ids(value) for value in values], fill[suffix], side=side)
                if suffix == "_input_ids" and mask_of(name) not in features[0]:
                    batch[mask_of(name)] = mask
            elif name.endswith("_logps"):
                batch[name] = torch.tensor(values)
            else:
                batch[name] = values
        return batch


@dataclass
class DataCollatorForPreference(DataCollatorMixin):
    """Pads the tokens of pairs as `DPOTrainer` prepares them: prompts on the left, completions on the right.

    The batch has `prompt_input_ids`, `chosen_input_ids` and `rejected_input_ids` with their `_attention_mask`, `(B, T)`
    each, and the reference's `ref_chosen_logps`, `ref_rejected_logps` `(B,)` and what belongs to images where the rows
    do.

    >>> rows = [{"prompt_input_ids": [1], "chosen_input_ids": [2, 3], "rejected_input_ids": [4]}]
    >>> DataCollatorForPreference(pad_token_id=0)(rows)["chosen_input_ids"]
    tensor([[2, 3]])
    """

    pad_token_id: int
    return_tensors: str = "pt"

    def torch_call(self, examples: Sequence[Row]) -> RowDict:
        names = [name for name in (*PAIR_COLUMNS, *REFERENCE_COLUMNS) if name in examples[0]]
        rows = [{name: example[name] for name in names} for example in examples]
        batch = DPODataCollatorWithPadding(self.pad_token_id)(rows)
        for name, side in _OF_IMAGES.items():
            if name in examples[0]:
                batch[name] = pad([torch.as_tensor(row[name]) for row in examples], padding_side=side)
        return batch


def as_pair_batch(batch: Batch, *, prefix_sharing: bool) -> Batch:
    """A batch of pairs in the form of `PairCollator`, from any collator.

    Also accepted: padded rows with `labels` (chosen and rejected in turn); `prompt_input_ids`, `chosen_input_ids`,
    `rejected_input_ids` with their `_attention_mask`; whole sequences `chosen_input_ids`, `chosen_labels`, ... with
    labels of -100 on the prompt. Raises ValueError for other batches.
    """
    if "labels" in batch or "decoder_labels" in batch:
        return batch
    if "chosen_labels" in batch:
        sides = [_cut_by_labels(batch, name) for name in PAIR_COLUMNS[1:]]
    else:
        check_columns(batch, [*PAIR_COLUMNS, *map(mask_of, PAIR_COLUMNS)])
        prompts, *columns = (real_tokens(batch, name) for name in PAIR_COLUMNS)
        sides = [list(zip(prompts, completions, strict=True)) for completions in columns]
    pairs = list(zip(*sides, strict=True))
    if prefix_sharing and all(torch.equal(chosen[0], rejected[0]) for chosen, rejected in pairs):
        rows = [(chosen[0], [chosen[1], rejected[1]]) for chosen, rejected in pairs]
        packed = completion_batch(rows, prefix_sharing=True)
    else:
        singles = [(prompt, [completion]) for pair in pairs for prompt, completion in pair]
        packed = completion_batch(singles, prefix_sharing=False)
    packed["rows"] = torch.arange(len(pairs))
    if REFERENCE_COLUMNS[0] in batch:
        packed["ref_logps"] = torch.stack([batch[name] for name in REFERENCE_COLUMNS], dim=1).flatten()
    return {name: value.to(batch["chosen_input_ids"].device) for name, value in packed.items()}


def _cut_by_labels(batch: Batch, name: str) -> list[tuple[Tensor, Tensor]]:
    """Whole sequences, cut where their labels begin: prompts and completions."""
    rows = real_tokens(batch, name)
    labels = real_tokens({**batch, name: batch[name.replace("_input_ids", "_labels")]}, name)
    starts = [int((row == IGNORED).cumprod(dim=0).sum()) for row in labels]
    return [(row[:start], row[start:]) for row, start in zip(rows, starts, strict=True)]


# ---- prompts that are trained too (ORPO)


def with_prompts_scored(batch: Batch) -> Batch:
    """A batch of pairs (any layout of `as_pair_batch`) in which the tokens of each chosen prompt are labelled as well.

    They belong to sequence 2i, in front of its completion. `prompt_tokens (B,)` says how many of a sequence's scored
    tokens they are: all but the prompt's first, which nothing predicts. A batch that has it is returned as it is.

    >>> batch = with_prompts_scored(completion_batch([([4, 5, 6], [[7], [8]])], prefix_sharing=True))
    >>> batch["scored_target"].tolist(), batch["scored_sequence"].tolist(), batch["prompt_tokens"].tolist()
    ([5, 6, 7, 8], [0, 0, 0, 1], [2])
    """
    if "prompt_tokens" in batch:
        return batch
    if "scored_target" in batch:
        return {**batch, **_of_prefix_groups(batch)}
    ids, labels = batch["input_ids"], batch["labels"]
    if "attention_mask" in batch:
        starts, is_real = torch.zeros_like(labels), batch["attention_mask"].bool().flatten()
        starts[:, 0] = 1
    else:
        starts, is_real = (batch["position_ids"] == 0).int(), None
    sequence, labelled = starts.flatten().cumsum(0) - 1, (labels != IGNORED).flatten()
    count, seen = (int(starts.sum()) // 2 * 2, labelled.cumsum(0))  # filler at the end of a packed row is no sequence
    before = seen == (seen - labelled.int())[starts.flatten() == 1][sequence]
    prompt = before & (sequence % 2 == 0) & (sequence < count if is_real is None else is_real)
    tokens = torch.bincount(sequence[prompt], minlength=count)[:count:2]
    labels = torch.where(prompt.view(labels.shape), ids, labels)
    return {**batch, "labels": labels, "prompt_tokens": (tokens - 1).clamp(min=0)}


def _of_prefix_groups(batch: Batch) -> dict[str, Tensor]:
    """The prompt in front of every chosen branch, labelled and scored."""
    table = batch["segment_table"][0, 0]
    chosen = table[table[:, 3] > 0][0::2]
    start, length = chosen[:, 2].to(batch["input_ids"].device), chosen[:, 3].to(batch["input_ids"].device)
    tokens = length - 1
    pair = torch.repeat_interleave(torch.arange(len(tokens), device=tokens.device), tokens)
    first = tokens.cumsum(0) - tokens  # where each prompt begins among the scored tokens
    source = torch.arange(len(pair), device=pair.device) - (first - start)[pair]
    ids, labels = batch["input_ids"][0], batch["labels"].clone()
    labels[0, source + 1] = ids[source + 1]
    return {
        "labels": labels,
        "scored_source": torch.cat([source, batch["scored_source"]]),
        "scored_target": torch.cat([ids[source + 1], batch["scored_target"]]),
        "scored_sequence": torch.cat([2 * pair, batch["scored_sequence"]]),
        "prompt_tokens": tokens,
    }
