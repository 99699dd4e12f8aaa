"""Sharded weights made whole for some modules at a time, and what whole ones will look like (ZeRO-3, FSDP2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trl.models.distributed import fsdp2_modules, gathered_parameters


def fsdp2_units(model: nn.Module) -> dict[nn.Module, Any]:
    """The FSDP2 module that shards the parameters of each module itself; modules that none shards are left out."""
    sharding = set(fsdp2_modules(model))
    found: dict[nn.Module, Any] = {}

    def visit(module: nn.Module, unit: Any) -> None:
        unit = module if module in sharding else unit
        if unit is not None:
            found.setdefault(module, unit)
        for child in module.children():
            visit(child, unit)

    visit(model, None)
    return found


@contextmanager
def gathered_modules(modules: Sequence[nn.Module], units: Iterable[Any] = ()) -> Iterator[None]:
    """A block in which the parameters of these modules, and all of these FSDP2 `units`, are whole on every rank.

    All ranks must enter it together. What was whole before stays so; nothing that is written inside is kept.
    """
    parameters = {
        parameter: None
        for module in modules
        for parameter in module.parameters()
        if _is_partitioned(parameter)
    }
    own = [unit for unit in units if _is_resharded(unit)]
    with torch.no_grad(), gathered_parameters(parameters):
        for unit in own:
            unit.unshard()
        try:
            yield
        finally:
            for unit in own:
                unit.reshard()


def whole_shape(parameter: Tensor, unit: Any | None = None) -> Tensor:
    """A tensor without data, with the shape and the dtype that a parameter has once it is gathered (by this FSDP2 unit)."""
    shape = getattr(parameter, "ds_shape", parameter.shape)  # a DTensor's is that of the whole
    dtype = parameter.dtype
    if unit is not None and dtype.is_floating_point and isinstance(parameter, nn.Parameter):
        dtype = unit._get_fsdp_state()._mp_policy.param_dtype or dtype  # gathered in it (torch 2.13)
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _is_partitioned(parameter: nn.Parameter) -> bool:
    """Whether ZeRO-3 holds a part of it only; those that persist, or that somebody else gathered, are whole."""
    status = getattr(parameter, "ds_status", None)
    return status is not None and status.name == "NOT_AVAILABLE"


def _is_resharded(unit: nn.Module) -> bool:
    """Whether what an FSDP2 module shards itself is not whole now."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    if any(isinstance(parameter, DTensor) for parameter in unit.parameters(recurse=False)):
        return True
    inner = [child for child in unit.children() if not isinstance(child, FSDPModule)]
    return any(_is_resharded(child) for child in inner)
