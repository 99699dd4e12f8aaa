"""bfloat16 weights that train as float32 ones: the optimiser's state keeps the 16 bits that rounding takes away.

The optimiser is the user's. It steps on float32 copies of a few parameters at a time. Of the optimisers for bfloat16 in other
packages none equals float32 weights: after 200 steps at 1e-6 torch-optimi's Kahan sums are off by 9e-5, heavyball's `bf16+16`
by 3e-4, torchao's stochastic rounding by 3e-3 (torch 2.13); flashoptim has optimisers of its own, for GPUs only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trl.models.parts import causal_core
from trl.models.peft import is_peft_model, resolve_dtype
from trl.options.shared import RESIDUAL

_STATE = "residual"  # in a parameter's state; bfloat16 in name, as PyTorch casts state to a parameter's dtype
_CHUNK = 2**24  # weights that are float32 at a time, unless a single parameter has more


def join(weight: Tensor, residual: Tensor) -> Tensor:
    """The float32 tensor of two bfloat16 tensors from `split`: its bits are `weight * 2**16 + residual`."""
    high = weight.view(torch.int16).to(torch.int32) << 16
    return high.add_(residual.view(torch.int16)).view(torch.float32)


def split(master: Tensor, weight: Tensor, residual: Tensor) -> None:
    """Write a float32 tensor, rounded to bfloat16, into `weight`, and the bits that this takes away into `residual`.

    `join` gives the same bits, NaN for NaN, and half way between two bfloat16 numbers, where rounding to even leaves 2**17 + 1
    values for 2**17 pairs, one float32 step less if that rounds down.
    """
    weight.copy_(master)
    lost = master.view(torch.int32) - (weight.view(torch.int16).to(torch.int32) << 16)
    residual.view(torch.int16).copy_(lost.clamp_(-(2**15), 2**15 - 1))


def to_bfloat16(model: nn.Module) -> None:
    """Round the weights of a model to bfloat16, in place; of one with adapters only what trains.

    Weights that the model's class keeps in float32 stay.
    """
    wide = tuple(getattr(causal_core(model), "_keep_in_fp32_modules_strict", None) or ())
    all_train = not is_peft_model(model)
    for name, parameter in model.named_parameters():
        is_kept = any(part in name for part in wide) or not (all_train or parameter.requires_grad)
        if parameter.is_floating_point() and not is_kept:
            parameter.data = parameter.data.to(torch.bfloat16)


def in_bfloat16(init_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `from_pretrained` with the dtype of weights that have residuals.

    Raises: ValueError for another dtype in them.
    """
    dtype = resolve_dtype(init_kwargs.get("dtype"))
    if dtype not in ("auto", torch.bfloat16):
        raise ValueError(
            f"weights={RESIDUAL!r} needs dtype='bfloat16', or none, got {dtype}. Or leave weights out."
        )
    return {**init_kwargs, "dtype": torch.bfloat16}


def check_residuals(accelerator: Any, optim: str = "") -> None:
    """Raise ValueError for a run that has other masters, gradients or steps than those of `KeepsResiduals`."""
    sharding = getattr(accelerator.state, "fsdp_plugin", None)
    precision = accelerator.mixed_precision
    reasons = (
        (
            accelerator.state.deepspeed_plugin,
            "DeepSpeed keeps float32 weights of its own. Leave one of them out",
        ),
        (precision == "fp16", "float16 scales its gradients. Train in bfloat16"),
        (sharding and sharding.fsdp_version != 2, "FSDP must be version 2"),
        (sharding and precision != "no", "FSDP makes weights float32 under mixed precision. Set bf16=False"),
        (
            re.search("lomo|layerwise|schedule_free", optim),
            f"optim={optim!r} has no step of its own. Use another",
        ),
    )
    for applies, reason in reasons:
        if applies:
            raise ValueError(f"weights={RESIDUAL!r} cannot be used here: {reason}.")


def keep_residuals(optimizer: Any) -> None:
    """Let an optimiser, in place, step its bfloat16 parameters as float32 ones."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's, in a second run
    kind = type(optimizer)
    if not issubclass(kind, KeepsResiduals):
        vars(optimizer).pop("step", None)  # of its class, bound by a scheduler
        optimizer.__class__ = type(kind.__name__, (KeepsResiduals, kind), {})


def clip_gradients(optimizer: Any, parameters: Iterable[Tensor], limit: float) -> float:
    """Let an optimiser that keeps residuals clip the gradients of its next step; returns their norm. All in float32."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    norm = torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms]))
    total = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    factor = getattr(optimizer, "optimizer", optimizer).gradient_scale = min(1.0, limit / (total + 1e-6))
    for gradient in gradients:
        if gradient.dtype != torch.bfloat16:
            gradient.mul_(factor)
    return total


class KeepsResiduals(torch.optim.Optimizer):
    """What `keep_residuals` adds to the class of an optimiser."""

    gradient_scale: float = 1.0
    """Multiplies the bfloat16 gradients of the next step in float32."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step: each parameter has a gradient in one of several calls of the optimiser's own step.

        Raises: TypeError for an optimiser that counts its steps once for many parameters.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        parameters = [each for group in self.param_groups for each in group["params"]]
        gradients = {
            each: each.grad for each in parameters if each.grad is not None and each.dtype == torch.bfloat16
        }
        for parameter in gradients:
            parameter.grad = None
        before = self._settings()
        super().step()  # parameters in other dtypes; bitsandbytes looks up its overrides by the parameters themselves
        if self._settings() != before:
            raise TypeError(
                f"weights={RESIDUAL!r} needs an optimiser with state per parameter, {type(self).__name__} has one per group. "
                "Use another optim."
            )
        for chunk in _chunks(gradients):
            self._step_in_float32(chunk)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        self.gradient_scale = 1.0
        return loss

    def _settings(self) -> list[dict[str, Any]]:
        return [{**group, "params": None} for group in self.param_groups]

    def _step_in_float32(self, gradients: dict[Tensor, Tensor]) -> None:
        masters, residuals = dict[Tensor, Tensor](), dict[Tensor, Tensor]()
        for parameter, gradient in gradients.items():
            state = self.state.pop(parameter, {})
            residual = residuals[parameter] = state.pop(_STATE, None)
            if residual is None:
                residual = residuals[parameter] = torch.zeros_like(parameter)
            master = masters[parameter] = _like(parameter, join(_local(parameter), _local(residual)))
            master.grad = gradient.float().mul_(self.gradient_scale)
            self.state[master] = state
        lists = [group["params"] for group in self.param_groups]
        for group in self.param_groups:  # in their places, which bitsandbytes counts
            group["params"] = [masters.get(each, each) for each in group["params"]]
        super().step()
        for group, parameters in zip(self.param_groups, lists, strict=True):
            group["params"] = parameters
        for parameter, master in masters.items():
            split(_local(master), _local(parameter), _local(residuals[parameter]))
            self.state[parameter] = {**self.state.pop(master), _STATE: residuals[parameter]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; tensors keep the dtype that they were saved in, where PyTorch casts them to the parameter's."""
        super().load_state_dict(state_dict)
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [each for group in self.param_groups for each in group["params"]]
        for key, parameter in zip(saved, parameters, strict=True):
            state = self.state.get(parameter, {})
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor) and name in state and state[name].dtype != value.dtype:
                    state[name] = value.to(state[name].device)


def _chunks(gradients: dict[Tensor, Tensor]) -> Iterator[dict[Tensor, Tensor]]:
    """Parameters with their gradients, as many at a time as have `_CHUNK` weights, or one."""
    chunk, size = dict[Tensor, Tensor](), 0
    for parameter, gradient in gradients.items():
        weights = _local(parameter).numel()
        if chunk and size + weights > _CHUNK:
            yield chunk
            chunk, size = {}, 0
        chunk[parameter], size = gradient, size + weights
    if chunk:
        yield chunk


def _local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _like(sharded: Tensor, local: Tensor) -> Tensor:
    """A tensor sharded as another one, of this process's part."""
    if not isinstance(sharded, DTensor):
        return local
    return DTensor.from_local(
        local,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )
