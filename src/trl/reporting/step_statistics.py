"""Statistics of a step as nested dicts of tensors, brought into the form that trackers take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

WANDB_PADDING = -1  # stands in histograms where a minibatch had fewer values than another


def flatten_dict(nested: Mapping[str, Any], sep: str = "/") -> dict[str, Any]:
    """A nested dict as a flat one, with the keys on the way joined by `sep`.

    Raises ValueError for a key that has `sep` in it.

    >>> flatten_dict({"loss": {"policy": 1, "value": 2}})
    {'loss/policy': 1, 'loss/value': 2}
    """
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if sep in str(key):
            raise ValueError(
                f"keys must not contain {sep!r}, got {key!r}. Rename it or choose another separator."
            )
        if isinstance(value, Mapping):
            flat.update({f"{key}{sep}{rest}": item for rest, item in flatten_dict(value, sep).items()})
        else:
            flat[str(key)] = value
    return flat


def stack_dicts(stats_dicts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Each name's tensors, flattened, as the rows of one, filled up with `WANDB_PADDING`.

    >>> stack_dicts([{"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor(3.0)}])
    {'x': tensor([[ 1.,  2.],
            [ 3., -1.]])}
    """
    names = stats_dicts[0] if stats_dicts else ()
    rows = {name: [stats[name].flatten() for stats in stats_dicts] for name in names}
    return {
        name: pad_sequence(values, batch_first=True, padding_value=WANDB_PADDING)
        for name, values in rows.items()
    }


def add_suffix(input_dict: Mapping[str, Any], suffix: str) -> dict[str, Any]:
    """The dict with `suffix` behind each key.

    >>> add_suffix({"loss": 1}, "/mean")
    {'loss/mean': 1}
    """
    return {f"{name}{suffix}": value for name, value in input_dict.items()}


def average_torch_dicts(list_of_dicts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Each name's mean over dicts of tensors, elementwise.

    >>> average_torch_dicts([{"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([3.0, 2.0])}])
    {'x': tensor([2., 2.])}
    """
    names = list_of_dicts[0] if list_of_dicts else ()
    return {name: torch.stack([each[name] for each in list_of_dicts]).mean(dim=0) for name in names}


def convert_to_scalar(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors and arrays of one element as plain numbers; everything else stays.

    >>> convert_to_scalar({"loss": torch.tensor(0.5), "lengths": torch.zeros(2)})
    {'loss': 0.5, 'lengths': tensor([0., 0.])}
    """
    plain = stats_to_np(stats)
    return {name: old if isinstance(plain[name], np.ndarray) else plain[name] for name, old in stats.items()}


def stats_to_np(stats_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors as numpy arrays, of one element as plain numbers; 16-bit floats become float32; other values stay.

    >>> stats_to_np({"loss": torch.tensor(0.5), "kept": "text"})
    {'loss': 0.5, 'kept': 'text'}
    """
    return {name: _plain(value) for name, value in stats_dict.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
        if value.dtype == np.float16:
            value = value.astype(np.float32)
    scalar = isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.size == 1)
    return value.item() if scalar else value
