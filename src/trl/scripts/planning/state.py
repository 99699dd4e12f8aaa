"""Bytes of tensors, of an optimiser's state and of a device, and how devices share them."""

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


def optimizer_bytes(args: "TrainingArguments", trained: Sequence[Tensor], model: Any = None) -> int:
    """Bytes of the optimiser's state, by what it keeps for one matrix of 256 x 256 after a step."""
    from transformers import Trainer

    kind, settings = Trainer.get_optimizer_cls_and_kwargs(args, model)
    if not trained or {"params", "model", "optimizer_dict"} & set(settings):  # or it needs the whole model
        return 0
    device = "cpu" if trained[0].is_meta else trained[0].device  # where 8-bit optimisers have their kernels
    probe = nn.Parameter(torch.zeros(256, 256, dtype=trained[0].dtype, device=device))
    optimizer = kind([probe], **settings)
    if getattr(args, "weights", None) is not None:
        keep_residuals(optimizer)
    probe.grad = torch.zeros_like(probe)
    optimizer.step()
    state = [tensor for tensor in optimizer.state[probe].values() if isinstance(tensor, Tensor)]
    return round(tensor_bytes(tensor for tensor in state if tensor.numel() > 1) / probe.nbytes * tensor_bytes(trained))


@dataclass(frozen=True, slots=True)
class Sharding:
    """What the `devices` share, by the `stage` of ZeRO: 1 the optimiser's state, 2 gradients too, 3 weights too."""

    name: str = "one device"
    devices: int = 1
    stage: int = 0
    half: bool = False  # computes with bfloat16 copies: FSDP of gathered weights, DeepSpeed of all

    @property
    def is_deepspeed(self) -> bool:
        """Whether it is DeepSpeed's, whose optimiser has float32 weights beside bfloat16 ones."""
        return self.name.startswith("ZeRO")

    def share(self, size: float, stage: int) -> float:
        """The bytes on one device of what is shared from this stage on."""
        return size / self.devices if self.stage >= stage else size


def sharding_of(profile: str | None, devices: int, *, half: bool) -> Sharding:
    """That of a profile or file of accelerate, or DDP. Raises: FileNotFoundError, ValueError for other kinds."""
    settings: dict[str, Any] = {}
    if profile is not None:
        with open(profile_path(profile), encoding="utf-8") as file:
            settings = yaml.safe_load(file) or {}
    kind = str(settings.get("distributed_type", "NO"))
    fsdp, zero = (settings.get(f"{name}_config") or {} for name in ("fsdp", "deepspeed"))
    for name, value in {**fsdp, **zero}.items():
        if "offload" in name and value not in (False, "none"):
            raise ValueError(f"accelerate_config has {name}: {value}. CPU offloading is not planned: leave it out.")
    if kind == "FSDP":
        return Sharding(f"FSDP{fsdp.get('fsdp_version', 1)}", devices, 3, half)
    if kind == "DEEPSPEED":
        stage = int(zero.get("zero_stage", 2))
        return Sharding(f"ZeRO-{stage}", devices, stage, half)
    if kind in ("NO", "MULTI_GPU", "MULTI_CPU"):
        return Sharding("DDP", devices) if devices > 1 else Sharding()
    raise ValueError(f"accelerate_config has distributed_type {kind}, expected FSDP, DEEPSPEED, MULTI_GPU or NO.")
