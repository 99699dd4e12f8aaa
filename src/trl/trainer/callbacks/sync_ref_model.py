"""A reference model that follows the policy (TR-DPO)."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerCallback

from trl.models.distributed import gathered_parameters, reshard
from trl.models.reference import FrozenModel, attach_reference
from trl.options.checks import warn_unread
from trl.options.methods import SYNC_SETTINGS


def move_reference(trainer: Any) -> FrozenModel | None:
    """Bring the reference to the device; it is returned if a callback moves it (`sync_ref_model` adds one)."""
    callbacks = trainer.callback_handler.callbacks
    if getattr(trainer.args, "sync_ref_model", False):
        trainer.add_callback(SyncRefModelCallback(None, trainer.accelerator))
    elif not any(isinstance(callback, SyncRefModelCallback) for callback in callbacks):
        reason = "with sync_ref_model=False. Set sync_ref_model=True, or leave it out"
        warn_unread(trainer.args, SYNC_SETTINGS, reason)
    moved = attach_reference(callbacks, trainer.reference, trainer.model)
    if trainer.reference is not None:
        trainer.reference.prepare(trainer.accelerator)
    return moved


@dataclass(eq=False)
class SyncRefModelCallback(TrainerCallback):
    """Moves the reference model towards the policy `every` so many optimiser steps (None: `args.ref_model_sync_steps`).

    The new reference is `alpha * policy + (1 - alpha) * reference` (None: `args.ref_model_mixup_alpha`); 1 copies
    the policy. Source: Gorbatovski et al. 2024, eq. 3 (soft) and 4 (hard update), arXiv:2404.09656.
    """

    ref_model: torch.nn.Module | None
    accelerator: Accelerator | None
    _: KW_ONLY
    alpha: float | None = None
    every: int | None = None

    @property
    def moves_reference(self) -> bool:
        """Always."""
        return True

    def use_reference(self, reference: torch.nn.Module) -> None:
        """Write into the trainer's reference, unless a `ref_model` was given."""
        if self.ref_model is None:
            self.ref_model = reference

    @staticmethod
    @torch.no_grad()
    def sync_target_model(model, target_model, alpha):
        """Mix `model`'s parameters into `target_model`'s, in place; ZeRO-3 shards are gathered, FSDP2 shards are not.

        Raises `ValueError` if the two do not have the same parameters.
        """
        reshard(model)
        reshard(target_model)
        for source, target in _paired(model, target_model):
            with gathered_parameters([source, target], modifier_rank=0):
                mixed = source.detach().to(dtype=target.dtype, device=target.device)
                target.data.mul_(1.0 - alpha).add_(mixed, alpha=alpha)

    def on_step_end(self, args: Any, state, control, **kwargs):
        model = kwargs["model"]
        every = args.ref_model_sync_steps if self.every is None else self.every
        if self.ref_model is None or state.global_step % every != 0:
            return
        target = self.ref_model
        if self.accelerator is not None:
            model, target = self.accelerator.unwrap_model(model), self.accelerator.unwrap_model(target)
        self.sync_target_model(model, target, args.ref_model_mixup_alpha if self.alpha is None else self.alpha)


def _paired(model: torch.nn.Module, target: torch.nn.Module) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    sources, targets = dict(model.named_parameters()), dict(target.named_parameters())
    if sources.keys() != targets.keys():
        only = sorted(sources.keys() ^ targets.keys())[:3]
        raise ValueError(
            f"The model and its reference must have the same parameters, these are in one only: {only}. With an "
            "adapter the base is the reference and does not move: train without sync_ref_model, or without PEFT."
        )
    return [(sources[name], targets[name]) for name in sources if sources[name] is not targets[name]]
