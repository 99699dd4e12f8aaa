"""BEMA whose average becomes the reference of preference training."""

from __future__ import annotations  # field types are recorded as they are written

from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import broadcast
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from trl.trainer.arguments import Processor
from trl.trainer.callbacks.bema import BEMACallback as _BEMACallback
from trl.trainer.callbacks.bema import trained_weights


class CallbackHandlerWithRefModel(CallbackHandler):
    """A `CallbackHandler` that also hands its `ref_model` to the callbacks of every event, under that keyword."""

    def __init__(
        self, callbacks: list[TrainerCallback], model: torch.nn.Module | None, ref_model: torch.nn.Module | None,
        processing_class: Processor | None, optimizer: torch.optim.Optimizer | None, lr_scheduler: LRScheduler | None,
    ) -> None:  # fmt: skip
        super().__init__(callbacks, model, processing_class, optimizer, lr_scheduler)
        self.ref_model = ref_model

    def call_event(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        """Call the method `event` of each callback; returns the control that the last of them left."""
        return super().call_event(event, args, state, control, ref_model=self.ref_model, **kwargs)


@dataclass(eq=False)
class BEMACallback(_BEMACallback):
    """`trl.BEMACallback` that also writes its average into the trainer's reference, with `update_ref_model=True`.

    At step `ref_model_update_after` and every `ref_model_update_freq` optimiser steps after it, the reference's weights
    become the BEMA weights as they are then. The other arguments are those of `trl.BEMACallback`.

    Example:
        >>> callback = BEMACallback(update_freq=100, update_ref_model=True, ref_model_update_freq=100)
        >>> trainer = DPOTrainer(model, args=args, train_dataset=pairs, callbacks=[callback])  # doctest: +SKIP
    """

    update_ref_model: bool = False
    ref_model_update_freq: int = 400
    ref_model_update_after: int = 0
    reference: torch.nn.Module | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ref_model_update_freq < 1:
            raise ValueError(
                f"ref_model_update_freq must be at least 1, got {self.ref_model_update_freq}. Use 1 for an update at "
                "every step."
            )

    @property
    def moves_reference(self) -> bool:
        """Whether `update_ref_model` asks for it."""
        return self.update_ref_model

    def use_reference(self, reference: torch.nn.Module) -> None:
        """Write into this module from now on."""
        self.reference = reference

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: PreTrainedModel,
        **kwargs: Any,
    ):  # fmt: skip
        if self.update_ref_model and self.reference is None:
            raise ValueError(
                "update_ref_model=True needs a trainer with a reference model, and this one hands out none. Use "
                "DPOTrainer, or set update_ref_model=False."
            )
        super().on_train_begin(args, state, control, model=model, **kwargs)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: PreTrainedModel,
        **kwargs: Any,
    ):  # fmt: skip
        super().on_step_end(args, state, control, model=model, **kwargs)
        step = state.global_step
        if self.reference is None or step < self.ref_model_update_after:
            return
        if (step - self.ref_model_update_after) % self.ref_model_update_freq == 0:
            self._write_reference(model)

    @torch.no_grad()
    def _write_reference(self, model: torch.nn.Module) -> None:
        """The main process holds the averages; the others are sent what it writes."""
        assert self.reference is not None
        targets = dict(self.reference.named_parameters())
        names = trained_weights(model).keys()
        if not names <= targets.keys():
            raise ValueError(
                f"The reference lacks weights that the model trains ({sorted(names - targets.keys())[:3]}), expected "
                "the same ones. Train without an adapter, or set update_ref_model=False."
            )
        running = dict(self.running_model.named_parameters()) if self.running_model is not None else None
        for name in names:
            if running is not None:
                targets[name].data.copy_(running[name])
            broadcast(targets[name].data, from_process=0)
