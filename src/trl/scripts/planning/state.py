"""Bytes of what stays through a run: weights, gradients, the optimiser's state, and how devices share them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import Tensor, nn

from trl.cli.launch import profile_path
from trl.models.residuals import keep_residuals

if TYPE_CHECKING:
    from transformers import TrainingArguments

_BLOCK = 64  # weights of one scale in four bits


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors together."""
    return sum(tensor.nbytes for tensor in tensors)


def make_optimizer(args: "TrainingArguments", parameters: Sequence[nn.Parameter], model: Any = None) -> Any:
    """The run's optimiser over some parameters; None for one that needs the whole model."""
    from transformers import Trainer

    kind, settings = Trainer.get_optimizer_cls_and_kwargs(args, model)
    if not parameters or {"params", "model", "optimizer_dict"} & set(settings):
        return None
    optimizer = kind(parameters, **settings)
    if getattr(args, "weights", None) is not None:
        keep_residuals(optimizer)
    return optimizer


def optimizer_bytes(args: "TrainingArguments", trained: Sequence[Tensor], model: Any = None) -> int:
    """Bytes of the optimiser's state, by what it keeps for one matrix of 256 x 256 after a step."""
    if not trained:
        return 0
    device = "cpu" if trained[0].is_meta else trained[0].device  # where 8-bit optimisers have their kernels
    probe = nn.Parameter(torch.zeros(256, 256, dtype=trained[0].dtype, device=device))
    optimizer = make_optimizer(args, [probe], model)
    if optimizer is None:
        return 0
    probe.grad = torch.zeros_like(probe)
    optimizer.step()
    state = [tensor for tensor in optimizer.state[probe].values() if isinstance(tensor, Tensor)]
    return round(tensor_bytes(tensor for tensor in state if tensor.numel() > 1) / probe.nbytes * tensor_bytes(trained))


def quantized_bytes(weight: Tensor, *, bits: int, nested: bool = False) -> float:
    """Bytes of a matrix in 8 bits with a float32 scale per row, or in 4 with one per block, `nested` in 8 bits itself."""
    if bits == 8:
        return weight.numel() + 4 * len(weight)
    scale = 1 + 4 / 256 if nested else 4
    return weight.numel() * (0.5 + scale / _BLOCK)


@dataclass(frozen=True, slots=True)
class Sharding:
    """How `devices` share a model: what each of them holds a part of only, and what is in CPU memory."""

    name: str = "one device"
    devices: int = 1
    weights: bool = False
    gradients: bool = False
    optimizer: bool = False
    buckets: bool = False  # DDP's copies of gradients
    offloads_weights: bool = False  # with gradients and optimiser
    offloads_optimizer: bool = False
    half: bool = False  # computes with bfloat16 copies: FSDP of gathered weights, DeepSpeed of all

    @property
    def is_deepspeed(self) -> bool:
        """Whether it is DeepSpeed's, whose optimiser has float32 weights beside bfloat16 ones."""
        return self.name.startswith("ZeRO")

    def part(self, size: float, *, shared: bool) -> float:
        """Bytes of one device."""
        return size / self.devices if shared else size


def sharding_of(profile: str, devices: int, *, half: bool) -> Sharding:
    """That of a profile or file of accelerate. Raises: FileNotFoundError, ValueError for a kind that is not planned."""
    with open(profile_path(profile), encoding="utf-8") as file:
        settings = yaml.safe_load(file) or {}
    kind = str(settings.get("distributed_type", "NO"))
    if kind == "FSDP":
        fsdp = settings.get("fsdp_config") or {}
        offloads = bool(fsdp.get("fsdp_offload_params"))
        name = f"FSDP{fsdp.get('fsdp_version', 1)}"
        return Sharding(name, devices, True, True, True, offloads_weights=offloads, half=half)
    if kind == "DEEPSPEED":
        zero = settings.get("deepspeed_config") or {}
        stage = int(zero.get("zero_stage", 2))
        return Sharding(
            f"ZeRO-{stage}", devices, stage > 2, stage > 1, stage > 0, half=half,
            offloads_weights=zero.get("offload_param_device", "none") != "none",
            offloads_optimizer=zero.get("offload_optimizer_device", "none") != "none",
        )  # fmt: skip
    if kind in ("NO", "MULTI_GPU", "MULTI_CPU"):
        return data_parallel(devices)
    raise ValueError(f"accelerate_config has distributed_type {kind}, expected FSDP, DEEPSPEED, MULTI_GPU or NO.")


def data_parallel(devices: int) -> Sharding:
    """Every device with the whole model; more than one with DDP."""
    return Sharding("DDP", devices, buckets=True) if devices > 1 else Sharding()
