"""Prompts with images, read once for all of their completions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trl.collators.images import is_per_token
from trl.models.parts import causal_core, prompt_learning_obstacle


class MoreInputs(NamedTuple):
    """What a decoder is given beside its prompts' ids, such as images.

    `of(requests, width)` makes it for prompts padded on the left to `width`. Requests of one name in `names` have all of it, and
    their prompt, in common. Tokens in `unread` stand for something in prompts alone: where a completion has them, `blank` is
    read.
    """

    of: Callable[[Sequence[int], int], Mapping[str, Tensor]]
    names: Sequence[Hashable]
    unread: Sequence[int] = ()
    blank: int = 0


def with_more(
    model: Any, inputs: Mapping[str, Tensor], more: MoreInputs, batch: Sequence[int], **settings: Any
) -> dict[str, Any]:
    """What `model.generate` goes on from: padded prompts `(B, T)` of a `batch` of requests, with what `more` says of them.

    Where requests are copies of each other, their prompts are read here, once each and but for their last tokens, and the cache
    is copied. `settings` are those of `generate`.
    """
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    names = [more.names[request] for request in batch]
    distinct = list(dict.fromkeys(names))
    ends_blindly = bool(torch.isin(ids[:, -1], ids.new_tensor(list(more.unread))).any())
    is_short = not bool(mask[:, :-1].any(dim=1).all())
    if len(distinct) == len(batch) or ends_blindly or is_short or prompt_learning_obstacle(model):
        return {**inputs, **_to(more.of(batch, ids.shape[1]), ids.device)}
    firsts = [names.index(name) for name in distinct]
    seen = _to(more.of([batch[row] for row in firsts], ids.shape[1]), ids.device)
    given = {"input_ids": ids[firsts], "attention_mask": mask[firsts], **seen}
    heads = {
        name: value[:, :-1] if name in inputs or is_per_token(name, value, given) else value
        for name, value in given.items()
    }
    found = model.generate(**heads, **settings, max_new_tokens=1, return_dict_in_generate=True)
    places = {name: place for place, name in enumerate(distinct)}
    rows = torch.tensor([places[name] for name in names], device=ids.device)
    found.past_key_values.reorder_cache(rows)
    _copy_offsets(model, rows)
    return {**inputs, "past_key_values": found.past_key_values}


def _copy_offsets(model: Any, rows: Tensor) -> None:
    """Qwen-VL and its kin keep how far the positions of rows lag behind their tokens on the model itself."""
    body: Any = causal_core(model).base_model
    offsets = getattr(body, "rope_deltas", None)
    if isinstance(offsets, Tensor):
        body.rope_deltas = offsets[rows]


def _to(values: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in values.items()}
