"""Bias-corrected exponential moving averages of the weights (BEMA)."""

import copy
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from trl.checkpoints.progress import SavesState
from trl.models.distributed import is_sharded
from trl.models.loading import cast_state, name_dtype, save_dtype
from trl.models.switches import without_ddp

logger = logging.getLogger(__name__)

OUTPUT_FOLDER = "bema"


@dataclass(eq=False)
class BEMACallback(SavesState):
    """Keeps a second model beside the trained one, whose weights are a bias-corrected average of its path.

    At optimiser step t, with step size s = lag + multiplier * t:

        EMA  <- (1 - beta) * EMA + beta * weights,    beta  = max(s ** -ema_power, min_ema_multiplier)
        BEMA <- EMA + alpha * (weights - start),      alpha = s ** -bias_power

    at the steps `update_after + update_freq`, `update_after + 2 * update_freq`, ...; the weights at step `update_after`
    are `start` and the first EMA. `running_model` holds the BEMA weights; the end of training saves it in
    `<output_dir>/bema`, in `save_dtype`. Averages are float32, on `device`, of trainable weights. Source: Block et al.
    2025, algorithm 1 (arXiv:2508.00180).

    Checkpoints hold the averages in `bema.safetensors`. Weights must be whole on every process (not ZeRO-3, not FSDP).
    """

    state_file = "bema.safetensors"

    update_freq: int = 400
    ema_power: float = 0.5
    bias_power: float = 0.2
    lag: int = 10
    update_after: int = 0
    multiplier: float = 1.0
    min_ema_multiplier: float = 0.0
    device: str = "cpu"
    running_model: Any = field(default=None, init=False)
    start: dict[str, Tensor] = field(default_factory=dict, init=False)
    ema: dict[str, Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for name, value in (("update_freq", self.update_freq), ("lag", self.lag)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}. Use 1.")
        if not 0.0 <= self.min_ema_multiplier <= 1.0:
            raise ValueError(f"min_ema_multiplier must be in [0, 1], got {self.min_ema_multiplier}. Use 0.")

    @torch.no_grad()
    def on_train_begin(self, args, state, control, *, model: nn.Module, **kwargs: object):
        if is_sharded(model):
            raise ValueError(
                "BEMACallback needs whole weights on every process, and they are sharded (ZeRO-3, FSDP). Use DDP or "
                "ZeRO-2."
            )
        if not state.is_world_process_zero:
            return
        self.running_model = copy.deepcopy(without_ddp(model)).to(self.device).eval()
        self._begin_at(model)
        if state.global_step > 0:
            self._resume(self.resumed_file(args, state))

    @torch.no_grad()
    def on_step_end(self, args, state, control, *, model: nn.Module, **kwargs: object):
        step = state.global_step
        if self.running_model is None or step < self.update_after:
            return
        if step == self.update_after:
            self._begin_at(model)
        elif (step - self.update_after) % self.update_freq == 0:
            self._update(model, step)

    def save_state(self, folder: Path) -> None:
        """Write both averages into a checkpoint."""
        if self.running_model is None:
            return
        running = {name: tensor.data for name, tensor in self._running().items()}
        parts = {"start": self.start, "ema": self.ema, "running": running}
        tensors = {f"{part}.{name}": x.contiguous() for part, values in parts.items() for name, x in values.items()}
        save_file(tensors, folder / f"{self.state_file}.incomplete")
        os.replace(folder / f"{self.state_file}.incomplete", folder / self.state_file)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object):
        if (model := self.running_model) is not None:
            folder = Path(str(args.output_dir)) / OUTPUT_FOLDER
            dtype = save_dtype(model, getattr(args, "save_dtype", None))
            model.save_pretrained(folder, state_dict=cast_state(model, model.state_dict(), dtype))
            name_dtype(folder, dtype)

    def _begin_at(self, model: nn.Module) -> None:
        """Let both averages begin at the model's present weights."""
        running = self._running()
        for name, weights in trained_weights(model).items():
            self.start[name] = weights.to(self.device, torch.float32, copy=True)
            self.ema[name] = self.start[name].clone()
            running[name].data.copy_(weights)

    def _update(self, model: nn.Module, step: int) -> None:
        size = self.lag + self.multiplier * step
        beta = max(size**-self.ema_power, self.min_ema_multiplier)
        alpha = size**-self.bias_power
        running = self._running()
        for name, weights in trained_weights(model).items():
            present = weights.to(self.device, torch.float32)
            ema = self.ema[name].mul_(1.0 - beta).add_(present, alpha=beta)
            running[name].data.copy_(ema + alpha * (present - self.start[name]))

    def _running(self) -> dict[str, Tensor]:
        return dict(self.running_model.named_parameters())

    def _resume(self, file: Path) -> None:
        if not file.is_file():
            logger.warning("%s is missing: the averages of BEMACallback begin again at the resumed weights.", file)
            return
        running = self._running()
        for key, value in load_file(file, device=self.device).items():
            part, name = key.split(".", 1)
            target = {"start": self.start, "ema": self.ema, "running": running}[part]
            target[name].data.copy_(value)


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's trainable parameters, detached, by the names they have without DDP."""
    return {name: p.detach() for name, p in without_ddp(model).named_parameters() if p.requires_grad}
