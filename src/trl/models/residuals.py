"""bfloat16 weights that train as float32 ones: the optimiser's state keeps the 16 bits that rounding takes away.

The optimiser is the user's. It steps on float32 copies of a few parameters at a time. Of the optimisers for bfloat16 in
other packages none equals float32 weights: after 200 steps at 1e-6 torch-optimi's Kahan sums are off by 9e-5,
heavyball's `bf16+16` by 3e-4, torchao's stochastic rounding by 3e-3 (torch 2.13); flashoptim's are for GPUs only.
"""

import math
import re
from collections.abc import Callable, Iterable
from itertools import accumulate, chain, groupby
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trl.models.parts import causal_core
from trl.models.peft import is_peft_model
from trl.options.shared import RESIDUAL

_STATE = "residual"  # in a parameter's state; bfloat16 in name, as PyTorch casts state to a parameter's dtype
_CHUNK = 2**24  # weights that are float32 at a time, and those of one parameter


def join(weight: Tensor, residual: Tensor) -> Tensor:
    """The float32 tensor of two bfloat16 tensors from `split`: its bits are `weight * 2**16 + residual`."""
    master = weight.float()
    _local(master).view(torch.int32).add_(_local(residual).view(torch.int16))
    return master


def split(master: Tensor, weight: Tensor, residual: Tensor) -> None:
    """Write a float32 tensor, rounded to bfloat16, into `weight`, and the bits that this takes away into `residual`.

    `join` gives the same bits, NaN for NaN, and half way between two bfloat16 numbers, where rounding to even leaves
    2**17 + 1 values for 2**17 pairs, one float32 step less if that rounds down.
    """
    weight.copy_(master)
    lost = _local(master).view(torch.int32) - _local(weight).float().view(torch.int32)
    _local(residual).view(torch.int16).copy_(lost.clamp_(-(2**15), 2**15 - 1))


def _local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def to_bfloat16(model: nn.Module) -> None:
    """Round weights to bfloat16, in place: not what the class keeps in float32, beside adapters only what trains."""
    wide = tuple(getattr(causal_core(model), "_keep_in_fp32_modules_strict", None) or ())
    all_train = not is_peft_model(model)
    for name, parameter in model.named_parameters():
        is_cast = parameter.is_floating_point() and (all_train or parameter.requires_grad)
        if is_cast and not any(part in name for part in wide):
            parameter.data = parameter.data.to(torch.bfloat16)


def copied_bytes(weights: Iterable[Tensor]) -> int:
    """Bytes that a step takes for the float32 copies of weights and gradients, and to round the largest weight."""
    sizes = [weight.numel() for weight in weights]
    return 8 * (max(max(sizes), min(_CHUNK, sum(sizes))) + max(sizes))


def check_residuals(accelerator: Accelerator, optim: str = "") -> None:
    """Raise ValueError for a run with other float32 weights, scaled gradients, or updates outside of the step."""
    sharding, precision = getattr(accelerator.state, "fsdp_plugin", None), accelerator.mixed_precision
    reasons = (
        (accelerator.state.deepspeed_plugin, "DeepSpeed keeps float32 weights of its own. Leave one of them out"),
        (precision == "fp16", "float16 scales its gradients. Train in bfloat16"),
        (sharding and sharding.fsdp_version != 2, "FSDP must be version 2"),
        (sharding and precision != "no", "FSDP makes weights float32 under mixed precision. Set bf16=False"),
        (re.search("lomo|layerwise|schedule_free", optim), f"optim={optim!r} has no step of its own. Use another"),
    )
    for applies, reason in reasons:
        if applies:
            raise ValueError(f"weights={RESIDUAL!r} cannot be used here: {reason}.")


def keep_residuals(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimiser, in place, step its bfloat16 parameters as float32 ones."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's, in a second run
    kind = type(optimizer)
    if not issubclass(kind, KeepsResiduals):
        vars(optimizer).pop("step", None)  # of its class, bound by a scheduler
        optimizer.__class__ = type(kind.__name__, (KeepsResiduals, kind), {})


def clip_gradients(optimizer: Any, parameters: Iterable[Tensor], limit: float) -> float:
    """The norm of the gradients; those that exceed `limit` are scaled in the next step. Both in float32."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    norm = torch.linalg.vector_norm(torch.stack([part.to(norms[0].device) for part in norms]))
    total = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    getattr(optimizer, "optimizer", optimizer).gradient_scale = min(1.0, limit / (total + 1e-6))
    return total


class ClipGradients:
    """Takes the place of `Accelerator.clip_grad_norm_`: gives `check` each norm before the update.

    Gradients of bfloat16 weights with residuals, whose optimiser `optimizer` returns, are clipped in float32.
    """

    def __init__(
        self, accelerator: Accelerator, check: Callable[[float], None], optimizer: Callable[[], Any] | None = None
    ) -> None:
        self._accelerator, self._check, self._optimizer = accelerator, check, optimizer
        self._clip = accelerator.clip_grad_norm_

    def __call__(self, parameters: Iterable[Tensor], max_norm: float, norm_type: int = 2) -> Any:
        """The norm, of which one that is not finite is an error (fp16 skips such steps)."""
        if self._optimizer is not None and math.isfinite(max_norm):
            norm = clip_gradients(self._optimizer(), parameters, max_norm)
        else:
            norm = self._clip(parameters, max_norm, norm_type)
        if norm is not None and self._accelerator.scaler is None:
            self._check(float(norm))
        return norm


class KeepsResiduals(torch.optim.Optimizer):
    """What `keep_residuals` adds to the class of an optimiser."""

    gradient_scale: float = 1.0
    """Multiplies the gradients of the next step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step, of which the optimiser's own makes a part for some of the parameters at a time.

        Raises: TypeError for an optimiser that has state of whole groups.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        parameters = chain(*(group["params"] for group in self.param_groups))
        gradients = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
        half = [parameter for parameter in gradients if parameter.dtype == torch.bfloat16]
        for parameter, gradient in gradients.items():
            if parameter.dtype == torch.bfloat16:
                parameter.grad = None
            else:
                gradient.mul_(self.gradient_scale)
        before = [{**group, "params": None} for group in self.param_groups]
        super().step()  # parameters of other dtypes; bitsandbytes finds its overrides by the parameters
        if [{**group, "params": None} for group in self.param_groups] != before:
            raise TypeError(
                f"weights={RESIDUAL!r} cannot be used with {type(self).__name__}, which has state of whole groups. "
                "Set another optim."
            )
        for parameter in gradients:
            parameter.grad = None
        ends = accumulate(_local(parameter).numel() for parameter in half)
        for _, chunk in groupby(zip(ends, half, strict=True), lambda item: item[0] // _CHUNK):
            self._step_in_float32([parameter for _, parameter in chunk], gradients)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        self.gradient_scale = 1.0
        return loss

    def _step_in_float32(self, parameters: list[Tensor], gradients: dict[Tensor, Tensor]) -> None:
        masters, residuals = dict[Tensor, Tensor](), dict[Tensor, Tensor]()
        for parameter in parameters:
            state = self.state.pop(parameter, {})
            residual = state.pop(_STATE, None)
            residuals[parameter] = torch.zeros_like(parameter) if residual is None else residual
            master = masters[parameter] = join(parameter.detach(), residuals[parameter])
            master.grad = gradients[parameter].float()
            if self.gradient_scale != 1:
                master.grad.mul_(self.gradient_scale)
            self.state[master] = state
        lists = [group["params"] for group in self.param_groups]
        for group in self.param_groups:  # in their places, which bitsandbytes counts
            group["params"] = [masters.get(parameter, parameter) for parameter in group["params"]]
        super().step()
        for group, originals in zip(self.param_groups, lists, strict=True):
            group["params"] = originals
        for parameter, master in masters.items():
            split(master, parameter, residuals[parameter])
            self.state[parameter] = {**self.state.pop(master), _STATE: residuals[parameter]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, each tensor in the dtype that it was saved in; PyTorch alone casts it to the parameter's."""
        super().load_state_dict(state_dict)
        names = chain(*(group["params"] for group in state_dict["param_groups"]))
        parameters = chain(*(group["params"] for group in self.param_groups))
        for number, parameter in zip(names, parameters, strict=True):
            state = self.state.get(parameter, {})
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and name in state and state[name].dtype != value.dtype:
                    state[name] = value.to(state[name].device)
