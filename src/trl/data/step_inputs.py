"""Inputs of trainers that are called step by step: checked rows for PPO and iterative SFT, and a resumable loader."""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from transformers import PreTrainedTokenizerBase

from trl.data.tokenization import encode_closed
from trl.tensors.padding import IGNORED

logger = logging.getLogger(__name__)

_OWN_COLUMNS = ("label", "query", "response")


@dataclass(frozen=True, slots=True)
class StepInputs:
    """B queries and responses, int64 `(length,)`; masks of the responses (1: the policy's token); scores `(B,)`."""

    queries: list[Tensor]
    responses: list[Tensor]
    masks: list[Tensor]
    scores: Tensor

    @property
    def repeats_queries(self) -> bool:
        """Whether every response begins with its whole query, more than a single token."""
        pairs = zip(self.queries, self.responses, strict=True)
        return all(1 < len(q) < len(response) and torch.equal(q, response[: len(q)]) for q, response in pairs)


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """The number of token ids (`vocabulary`) and of tokens (`context_length`, None: no limit) that a model takes.

    `start` is the token that an encoder-decoder's completions begin with; None for a decoder.
    """

    vocabulary: int
    context_length: int | None
    start: int | None = None


def token_row(
    name: str, row: object, device: torch.device | str = "cpu", *, vocabulary: int | None = None, is_mask: bool = False
) -> Tensor:
    """One row of token ids or labels as int64 `(T,)`; `(1, T)`, as `generate` returns it, is taken too.

    Raises: TypeError or ValueError unless it is at least one integer (of a mask: or boolean), all below `vocabulary`.
    """
    if not isinstance(row, (Tensor, np.ndarray, list, tuple)):
        raise TypeError(f"{name} must be a tensor of token ids, got {type(row).__name__}. Tokenize texts.")
    ids = torch.as_tensor(row)
    ids = ids[0] if ids.ndim == 2 and len(ids) == 1 else ids
    if ids.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(ids.shape)}.")
    if not len(ids):
        raise ValueError(f"{name} is empty, expected at least 1 token. Leave the row out.")
    if ids.is_floating_point() or (ids.dtype == torch.bool and not is_mask):
        raise TypeError(f"{name} must hold token ids (integers), got {ids.dtype}. Convert it with .long().")
    if vocabulary is not None and (int(ids.min()) < 0 or int(ids.max()) >= vocabulary):
        span = f"{int(ids.min())} to {int(ids.max())}"
        raise ValueError(f"{name} must have ids from 0 to {vocabulary - 1}, got {span}. Use the model's tokenizer.")
    return ids.detach().to(device, torch.int64)


def check_step_inputs(
    queries: Sequence, responses: Sequence, scores: Sequence | Tensor, masks: Sequence | None, *, batch_size: int,
    limits: TokenLimits, device: torch.device,
) -> StepInputs:  # fmt: skip
    """The inputs of `PPOTrainer.step` in their final form, on a device. Raises: TypeError or ValueError, with the row.

    The start token of an encoder-decoder's responses, as `generate` gives them, is removed.
    """
    for name, rows in (("queries", queries), ("responses", responses), ("response_masks", masks)):
        if rows is not None and not isinstance(rows, (list, tuple)):
            raise TypeError(f"{name} must be a list of tensors, got {type(rows).__name__}. Use list(tensor).")
        if rows is not None and len(rows) != batch_size:
            wrong = f"{name} must be batch_size={batch_size} tensors, got {len(rows)}"
            raise ValueError(f"{wrong}. Use drop_last=True, or set batch_size.")
    inputs = []
    for index, (query, answer) in enumerate(zip(queries, responses, strict=True)):
        query = token_row(f"queries[{index}]", query, device, vocabulary=limits.vocabulary)
        answer = token_row(f"responses[{index}]", answer, device, vocabulary=limits.vocabulary)
        mask = _mask(f"response_masks[{index}]", None if masks is None else masks[index], answer)
        if limits.start is not None and answer[0] == limits.start:
            answer, mask = answer[1:], mask[1:]
        if not mask.any():
            raise ValueError(f"response_masks[{index}] must have a 1 behind the start token.")
        length = len(query) + len(answer) if limits.start is None else max(len(query), len(answer))
        if limits.context_length is not None and length > limits.context_length:
            both = f"queries[{index}] and responses[{index}]"
            raise ValueError(f"{both} have {length} tokens, the context length is {limits.context_length}.")
        inputs.append((query, answer, mask))
    if sum(int(mask.sum()) for _, _, mask in inputs) < 2:
        raise ValueError("responses must have at least 2 tokens together, got 1. Raise batch_size.")
    all_queries, answers, kept = map(list, zip(*inputs, strict=True))
    return StepInputs(all_queries, answers, kept, _scores(scores, len(inputs), device))


def check_queries(queries: Iterable, limits: TokenLimits) -> list[Tensor]:
    """Queries to generate from, as int64 `(length,)` on their devices. Raises: TypeError or ValueError."""
    rows = []
    for index, row in enumerate(queries):
        device = row.device if isinstance(row, Tensor) else "cpu"
        query = token_row(f"queries[{index}]", row, device, vocabulary=limits.vocabulary)
        room = 0 if limits.start is not None else 1
        if limits.context_length is not None and len(query) + room > limits.context_length:
            most = limits.context_length
            raise ValueError(f"queries[{index}] has {len(query)} tokens, the context length is {most}. Truncate it.")
        rows.append(query)
    return rows


def _scores(scores: Sequence | Tensor, count: int, device: torch.device) -> Tensor:
    """Scores as float32 `(count,)`: numbers, tensors of one element, or one tensor of all."""
    if len(scores) != count:
        raise ValueError(f"scores must be {count}, one per response, got {len(scores)}.")
    numbers = []
    for index, score in enumerate(scores):
        if isinstance(score, bool) or not (isinstance(score, (int, float)) or hasattr(score, "item")):
            raise TypeError(f"scores[{index}] must be a tensor or a number, got {type(score).__name__}.")
        tensor = torch.as_tensor(score)
        if tensor.ndim > 1 or tensor.numel() != 1:
            raise ValueError(f"scores[{index}] must be one number, got shape {tuple(tensor.shape)}.")
        numbers.append(tensor.detach().reshape(()).to(device, torch.float32))
    table = torch.stack(numbers)
    if wrong := (~torch.isfinite(table)).nonzero()[:, 0].tolist():
        raise ValueError(f"scores must be finite, got {table[wrong[0]].item()} (rows {wrong}).")
    return table


def _mask(name: str, row: object, response: Tensor) -> Tensor:
    mask = torch.ones_like(response) if row is None else torch.as_tensor(row).flatten()
    if len(mask) != len(response):
        raise ValueError(f"{name} must have an entry for each of {len(response)} tokens, got {len(mask)}.")
    if not ((mask == 0) | (mask == 1)).all():
        raise ValueError(f"{name} must be 0 or 1, got {sorted(set(mask.tolist()))}.")
    return mask.detach().to(response.device, torch.int64)


Rows = list[dict[str, Tensor]]


@dataclass(frozen=True)
class StepRows:
    """Makes rows of `input_ids` and `labels` (of one length for a decoder) for `IterativeSFTTrainer.step`."""

    tokenizer: PreTrainedTokenizerBase
    is_encoder_decoder: bool
    max_length: int | None
    keep_end: bool

    def __call__(
        self, *, input_ids: object, attention_mask: object, labels: object, texts: object, texts_labels: object
    ) -> Rows:
        """The rows, in order. Raises: ValueError or TypeError naming the argument and the row that cannot be used."""
        if (input_ids is None) == (texts is None):
            both = "both" if input_ids is not None else "neither"
            raise ValueError(f"step takes input_ids or texts, got {both}. Give one of them.")
        of_tokens = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        unread = {"texts_labels": texts_labels} if texts is None else of_tokens
        if superfluous := [name for name, value in unread.items() if value is not None]:
            other = "input_ids" if texts is None else "texts"
            raise ValueError(f"{', '.join(superfluous)} cannot be given with {other}. Leave it out.")
        if texts is None:
            ids, name, targets = self._read("input_ids", input_ids), "labels", labels
        else:
            ids, name, targets = self._read("texts", texts), "texts_labels", texts_labels
        if targets is None and self.is_encoder_decoder:
            raise ValueError(f"step of an encoder-decoder needs {name}: what the decoder is to write.")
        targets = ids if targets is None else self._read(name, targets, len(ids))
        masks = [None] * len(ids)
        if attention_mask is not None:
            masks = self._read("attention_mask", attention_mask, len(ids))
        inputs = zip(ids, targets, masks, strict=True)
        return [self._row(number, name, *row) for number, row in enumerate(inputs)]

    def _read(self, name: str, rows: Any, count: int | None = None) -> list[Tensor]:
        is_text, is_rows = name.startswith("texts"), isinstance(rows, (Tensor, Sequence))
        if not is_rows or isinstance(rows, str) or not len(rows):
            kind, got = "text" if is_text else "tensor", f"{rows!r:.40}" if is_rows else type(rows).__name__
            raise TypeError(f"{name} must be a list of at least 1 {kind}, got {got}. Put the rows in a list.")
        if count is not None and len(rows) != count:
            raise ValueError(f"{name} has {len(rows)} rows, expected {count}, one for each input.")
        if not is_text:
            is_mask = name == "attention_mask"
            return [token_row(f"{name}[{number}]", row, is_mask=is_mask) for number, row in enumerate(rows)]
        for number, text in enumerate(rows):
            if not isinstance(text, str) or not text:
                raise TypeError(f"{name}[{number}] must be a text, got {text!r:.40}. Leave the row out.")
        return [torch.tensor(ids, dtype=torch.int64) for ids, _ in encode_closed(self.tokenizer, list(rows))]

    def _row(self, number: int, name: str, row: Tensor, target: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        others = {"attention_mask": mask, name: None if self.is_encoder_decoder else target}
        for other, values in others.items():
            if values is not None and len(values) != len(row):
                raise ValueError(f"{other}[{number}] must have {len(row)} values, got {len(values)}.")
        if mask is not None:
            target = target if self.is_encoder_decoder else target[mask != 0]
            row = row[mask != 0]
        if self.is_encoder_decoder:  # the beginning of an answer is kept, without padding at its end
            trained = (target != IGNORED).nonzero()
            labels = target[: int(trained[-1]) + 1 if len(trained) else 0][: self.max_length]
        else:
            labels = self._cut(target).clone()
        predicted = labels if self.is_encoder_decoder else labels[1:]  # nothing predicts a decoder's first token
        if not (predicted != IGNORED).any():
            was_cut = len(target) > len(labels)
            cut = f" after it was cut from {len(target)} to {len(labels)}" if was_cut else ""
            raise ValueError(f"row {number} has no trained token{cut}. Change labels, or raise max_length.")
        return {"input_ids": self._cut(row), "labels": labels}

    def _cut(self, row: Tensor) -> Tensor:
        if self.max_length is None:
            return row
        return row[-self.max_length :] if self.keep_end else row[: self.max_length]


class ShuffledShares(Sampler[int]):
    """This process's rows of every whole batch, in an order that depends on seed and epoch alone."""

    def __init__(self, rows: int, batch_size: int, *, seed: int, rank: int, processes: int) -> None:
        self.rows, self.batch_size, self.seed = rows, batch_size, seed
        self.rank, self.processes = rank, processes
        self.epoch, self.first_batch = 0, 0

    @property
    def batches(self) -> int:
        return self.rows // (self.batch_size * self.processes)

    def __len__(self) -> int:
        return (self.batches - self.first_batch) * self.batch_size

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.rows, generator=generator)
        used = order[: self.batches * self.batch_size * self.processes]
        local_rows = used.view(self.batches, self.processes, self.batch_size)[self.first_batch :, self.rank]
        yield from local_rows.flatten().tolist()


class QueryLoader(DataLoader):
    """A resumable data loader: `epoch` passes are over, and `position` batches of this one were handed out.

    A pass begins anew with each `for`, except for the first one after `load_state_dict`, which continues there.
    """

    def __init__(self, dataset: Any, shares: ShuffledShares, *, collate_fn: Callable, device: torch.device) -> None:
        unused = torch.Generator()  # each pass, a resumed one too, would draw from the global one
        size = shares.batch_size
        super().__init__(dataset, size, sampler=shares, collate_fn=collate_fn, drop_last=True, generator=unused)
        self.shares, self.device = shares, device
        self.epoch, self.position = 0, 0
        self._resumed = False

    def __len__(self) -> int:
        return self.shares.batches

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not self._resumed:
            self.epoch, self.position = self.epoch + (self.position > 0), 0
        self._resumed = False
        self.shares.epoch, self.shares.first_batch = self.epoch, self.position
        for batch in super().__iter__():
            self.position += 1
            yield send_to_device(batch, self.device)
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Its position; the end of a pass is the beginning of the next."""
        over = self.position >= len(self)
        return {"epoch": self.epoch + over, "position": 0 if over else self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from there in the next pass."""
        self.epoch, self.position = state["epoch"], state["position"]
        self._resumed = True


def make_loader(
    dataset: Any, *, batch_size: int, collate_fn: Callable | None, seed: int, accelerator: Accelerator,
    keep: object | None,
) -> QueryLoader:  # fmt: skip
    """A loader of whole batches, `batch_size` rows per process.

    Columns of a `datasets.Dataset` that neither the model `keep` (None: all stay) reads nor a loop needs are left out.
    Raises: TypeError for a data set without rows by number, ValueError for fewer rows than a batch.
    """
    if isinstance(dataset, dict) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(f"dataset must have a length and rows by number, got {type(dataset).__name__}.")
    if isinstance(dataset, datasets.Dataset) and keep is not None:
        dataset = _with_used_columns(dataset, keep)
    rank, processes = accelerator.process_index, accelerator.num_processes
    shares = ShuffledShares(len(dataset), batch_size, seed=seed, rank=rank, processes=processes)
    if not shares.batches:
        least = f"batch_size * processes = {batch_size} * {accelerator.num_processes} rows"
        raise ValueError(f"dataset must have at least {least}, got {len(dataset)}. Lower batch_size or add rows.")
    return QueryLoader(dataset, shares, collate_fn=collate_fn or lists_of_columns, device=accelerator.device)


def lists_of_columns(rows: list) -> Any:
    """Rows as a dict of lists, token ids among them as tensors; rows that are no dicts as torch would collate them.

    >>> lists_of_columns([{"query": "a", "input_ids": [1]}, {"query": "b", "input_ids": [2, 3]}])
    {'query': ['a', 'b'], 'input_ids': [tensor([1]), tensor([2, 3])]}
    """
    if not isinstance(rows[0], dict):
        return torch.utils.data.default_collate(rows)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    for values in columns.values():
        for place, value in enumerate(values):
            if isinstance(value, list) and value and all(type(item) is int for item in value):
                values[place] = torch.tensor(value)
    return columns


def _with_used_columns(dataset: datasets.Dataset, model: Any) -> datasets.Dataset:
    inner = getattr(model, "pretrained_model", model)
    core = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    used = {*inspect.signature(core.forward).parameters, *_OWN_COLUMNS}
    unused = [name for name in dataset.column_names if name not in used]
    if len(unused) == len(dataset.column_names):
        raise ValueError(f"dataset has no used column, only {unused}. Or set remove_unused_columns=False.")
    if unused:
        logger.info("Columns %s of the dataset are left out (remove_unused_columns).", ", ".join(unused))
    return dataset.remove_columns(unused)
