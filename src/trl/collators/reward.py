"""Pairs of whole sequences for reward models, as one packed row or padded."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.data.data_collator import DataCollatorMixin

from trl.collators.rows import (
    Batch,
    Row,
    as_ids,
    check_columns,
    check_filled,
    mask_of,
    pad_with_mask,
    real_tokens,
    round_up,
)
from trl.data.formats import RowDict
from trl.data.preference_rows import OLDER_REWARD_COLUMNS, REWARD_COLUMNS
from trl.options.checks import check_at_least
from trl.tensors.segments import Segments

Pair = tuple[Tensor, Tensor]
"""Token ids of the preferred sequence and of the other one."""


def shared_length(*sequences: Tensor) -> int:
    """The length of the common prefix of some sequences; each keeps at least one token after it.

    >>> shared_length(torch.tensor([5, 6, 7]), torch.tensor([5, 6]))
    1
    """
    shorter = min(map(len, sequences))
    heads = torch.stack([sequence[:shorter] for sequence in sequences])
    same = (heads == heads[0]).all(dim=0).cumprod(dim=0)
    return min(int(same.sum()), shorter - 1)


def group_batch(
    groups: Sequence[Sequence[Tensor]], *, prefix_sharing: bool, pad_token_id: int = 0, multiple: int | None = None
) -> dict[str, Tensor]:
    """Groups of whole sequences (none empty) as one packed batch, in their order.

    With `prefix_sharing` the common prefix of a group occurs once, before the rests. The row's length is rounded up to
    `multiple`, by `filler` tokens. `rows (B,)` counts the groups.

    >>> group = [torch.tensor(ids) for ids in ([5, 6, 7], [5, 6, 8], [5, 6, 9])]
    >>> group_batch([group], prefix_sharing=True)["input_ids"].tolist()
    [[5, 6, 7, 8, 9]]
    """
    parts: list[tuple[int, list[int]]] = []
    ids: list[Tensor] = []
    for group in groups:
        shared = shared_length(*group) if prefix_sharing and len(group) > 1 else 0
        if shared:
            parts.append((shared, [len(sequence) - shared for sequence in group]))
            ids += [group[0][:shared], *(sequence[shared:] for sequence in group)]
        else:
            parts += [(len(sequence), []) for sequence in group]
            ids += group
    row = torch.cat(ids)
    tail = round_up(len(row), multiple) - len(row)
    segments = Segments.from_prefix_groups([*parts, *([(tail, [])] if tail else [])])
    return {
        "rows": torch.arange(len(groups)),
        "input_ids": torch.nn.functional.pad(row, (0, tail), value=pad_token_id)[None],
        "position_ids": segments.position_ids(),
        "segment_table": segments.table,
        **({"filler": torch.tensor([tail])} if tail else {}),
    }


@dataclass
class RewardCollator:
    """Batches rows of `chosen_input_ids` and `rejected_input_ids` (whole sequences), and `margin` where they have it.

    A batch is one packed row as `group_batch` makes it; where not `packed`, rows padded on the right, chosen and
    rejected in turn.

    Args:
        prefix_sharing: Whether the common prefix of a pair occurs once.
        packed: Whether the model takes packed rows; padded ones if not.
        pad_token_id: Token that fills padded positions.
        pad_to_multiple_of: Rounds the length of the packed row, or of the padded rows, up to a multiple, in tokens.

    >>> RewardCollator()([{"chosen_input_ids": [5, 6], "rejected_input_ids": [5, 7]}])["position_ids"].tolist()
    [[0, 1, 1]]
    """

    prefix_sharing: bool = True
    packed: bool = True
    pad_token_id: int = 0
    pad_to_multiple_of: int | None = None

    def __post_init__(self) -> None:
        check_at_least("pad_to_multiple_of", self.pad_to_multiple_of, minimum=1)

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        pairs = [(as_ids(row["chosen_input_ids"]), as_ids(row["rejected_input_ids"])) for row in rows]
        pad, multiple, sharing = self.pad_token_id, self.pad_to_multiple_of, self.prefix_sharing
        check_filled(pairs)
        if self.packed:
            batch = group_batch(pairs, prefix_sharing=sharing, pad_token_id=pad, multiple=multiple)
        else:
            ids, mask = pad_with_mask([ids for pair in pairs for ids in pair], pad, multiple=multiple)
            batch = {"rows": torch.arange(len(pairs)), "input_ids": ids, "attention_mask": mask}
        if rows[0].get("margin") is not None:
            batch["margin"] = torch.tensor([float(row["margin"]) for row in rows], dtype=torch.float64)
        return batch


@dataclass
class RewardDataCollatorWithPadding:
    """Pads the two sides of pairs separately (TRL 0.4-0.17).

    Rows have `input_ids_chosen` and `input_ids_rejected` (or, prepared by `RewardTrainer`, `chosen_input_ids` and
    `rejected_input_ids`), where given with `attention_mask_chosen` and `attention_mask_rejected`, and `margin`. The
    batch has `input_ids_chosen`, `attention_mask_chosen` `(B, T)`, the same of the rejected, `margin (B,)`, and
    `return_loss`.

    Args:
        tokenizer: Pads the rows, on its own side.
        padding: True or "longest": to the longest row of each side; "max_length": to the tokenizer's greatest length.
        pad_to_multiple_of: Rounds both lengths up to a multiple, in tokens.
        return_tensors: Kind of tensors, "pt".
    """

    tokenizer: PreTrainedTokenizerBase
    padding: bool | str = True
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def __call__(self, features: Sequence[Row]) -> RowDict:
        """The padded batch.

        Raises: ValueError for rows without the tokens of both sides.
        """
        batch: RowDict = {"return_loss": True}
        for older, column in zip(OLDER_REWARD_COLUMNS, REWARD_COLUMNS, strict=True):
            name, mask = older if older in features[0] else column, mask_of(older)
            for row in features:
                check_columns(row, [name])
            sides = [
                {"input_ids": row[name], "attention_mask": [1] * len(row[name]) if row.get(mask) is None else row[mask]}
                for row in features
            ]
            padded = self.tokenizer.pad(
                sides, padding=self.padding, pad_to_multiple_of=self.pad_to_multiple_of,
                return_tensors=self.return_tensors,
            )  # fmt: skip
            batch[older] = padded["input_ids"]
            batch[mask] = padded["attention_mask"]
        if features[0].get("margin") is not None:
            batch["margin"] = torch.tensor([float(row["margin"]) for row in features])
        return batch


@dataclass
class DataCollatorForPreference(DataCollatorMixin):
    """Pads `chosen_input_ids` and `rejected_input_ids` on the right, as `input_ids`, `attention_mask` `(2B, T)`.

    All preferred sequences come first, then the others. `margin (B,)` where the rows have it.

    >>> rows = [{"chosen_input_ids": [1, 2], "rejected_input_ids": [3]}]
    >>> DataCollatorForPreference(pad_token_id=0)(rows)["input_ids"]
    tensor([[1, 2],
            [3, 0]])
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def torch_call(self, examples: Sequence[Row]) -> RowDict:
        ids = [as_ids(row[column]) for column in REWARD_COLUMNS for row in examples]
        padded, mask = pad_with_mask(ids, self.pad_token_id, multiple=self.pad_to_multiple_of)
        batch: RowDict = {"input_ids": padded, "attention_mask": mask}
        if "margin" in examples[0]:
            batch["margin"] = torch.tensor([float(row["margin"]) for row in examples])
        return batch


def as_reward_batch(batch: Batch, *, prefix_sharing: bool) -> Batch:
    """A batch of pairs in the form of `RewardCollator`, from any collator.

    Also accepted: padded rows `(2B, T)` (all chosen, then all rejected); tensors `(B, T)` of each side with their
    masks, named as by `RewardDataCollatorWithPadding`, or `chosen_input_ids`, `chosen_attention_mask`. Raises
    ValueError for other batches.
    """
    if "input_ids" in batch:
        if "rows" in batch:
            return batch
        rows = batch["input_ids"].shape[0]
        if rows % 2:
            raise ValueError(f"input_ids must have an even number of rows, chosen before rejected, got {rows}.")
        order = torch.arange(rows, device=batch["input_ids"].device).view(2, -1).T.flatten()  # in turn
        padded = {name: batch[name][order] for name in ("input_ids", "attention_mask") if name in batch}
        return {**batch, **padded, "rows": torch.arange(rows // 2, device=order.device)}
    columns = REWARD_COLUMNS if set(REWARD_COLUMNS) <= set(batch) else OLDER_REWARD_COLUMNS
    check_columns(batch, columns)
    pairs = list(zip(*(real_tokens(batch, column) for column in columns), strict=True))
    check_filled(pairs)
    packed = group_batch(pairs, prefix_sharing=prefix_sharing)
    packed = {name: value.to(batch[columns[0]].device) for name, value in packed.items()}
    return {**packed, "margin": batch["margin"]} if batch.get("margin") is not None else packed
