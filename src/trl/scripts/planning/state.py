"""Bytes of tensors and of an optimiser's state, and how devices share them."""

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


@dataclass(frozen=True, slots=True)
class Sharding:
    """Among how many of the `devices` weights, gradients and optimiser state are divided, and what is in CPU memory."""

    name: str = "one device"
    devices: int = 1
    weights: int = 1
    gradients: int = 1
    optimizer: int = 1
    offloads_weights: bool = False  # with gradients and optimiser
    offloads_optimizer: bool = False
    half: bool = False  # computes with bfloat16 copies: FSDP of gathered weights, DeepSpeed of all

    @property
    def is_deepspeed(self) -> bool:
        """Whether it is DeepSpeed's, whose optimiser has float32 weights beside bfloat16 ones."""
        return self.name.startswith("ZeRO")


def sharding_of(profile: str | None, devices: int, *, half: bool) -> Sharding:
    """That of a profile or file of accelerate, or DDP. Raises: FileNotFoundError, ValueError for other kinds."""
    settings: dict[str, Any] = {}
    if profile is not None:
        with open(profile_path(profile), encoding="utf-8") as file:
            settings = yaml.safe_load(file) or {}
    kind = str(settings.get("distributed_type", "NO"))
    if kind == "FSDP":
        fsdp = settings.get("fsdp_config") or {}
        name, offloads = f"FSDP{fsdp.get('fsdp_version', 1)}", bool(fsdp.get("fsdp_offload_params"))
        return Sharding(name, devices, devices, devices, devices, offloads_weights=offloads, half=half)
    if kind == "DEEPSPEED":
        zero = settings.get("deepspeed_config") or {}
        stage = int(zero.get("zero_stage", 2))
        parts = [devices if stage > least else 1 for least in (2, 1, 0)]
        weights, optimizer = (zero.get(f"offload_{part}_device", "none") != "none" for part in ("param", "optimizer"))
        return Sharding(f"ZeRO-{stage}", devices, parts[0], parts[1], parts[2], weights, optimizer, half)
    if kind in ("NO", "MULTI_GPU", "MULTI_CPU"):
        return Sharding("DDP", devices) if devices > 1 else Sharding()
    raise ValueError(f"accelerate_config has distributed_type {kind}, expected FSDP, DEEPSPEED, MULTI_GPU or NO.")
