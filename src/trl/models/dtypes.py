"""Names of torch dtypes, as they stand in configs and on command lines."""

import torch


def resolve_dtype(dtype: str | torch.dtype | None) -> str | torch.dtype:
    """The torch dtype that a config's string names; `"auto"` (also for `None`) keeps the checkpoint's own."""
    if dtype is None or dtype == "auto" or isinstance(dtype, torch.dtype):
        return "auto" if dtype is None else dtype
    named = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else None
    if isinstance(named, torch.dtype) and named.is_floating_point:
        return named
    raise ValueError(
        f"dtype must be 'auto', a torch.dtype or the name of a floating one, got {dtype!r}. "
        "Use for example 'float32', 'bfloat16' or 'float16'."
    )
