"""The reference that a trainer holds: brought to the device, lent to the callbacks that move it, part of checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trl.models.reference import FrozenModel
from trl.models.reference_moves import check_moves, lend_reference
from trl.options.checks import warn_unread
from trl.options.policy_gradient import SYNC_SETTINGS
from trl.trainer.callbacks.sync_ref_model import SyncRefModelCallback

if TYPE_CHECKING:
    from trl.trainer.base_trainer import BaseTrainer as _Trainer
else:
    _Trainer = object


class HoldsReference(_Trainer):
    """Mixin in front of `BaseTrainer`: a trainer with a `reference`."""

    reference: Any = None
    _moved_reference: FrozenModel | None = None

    ref_model: nn.Module | None  # the reference, where it is a model of its own

    def settle_reference(self) -> None:
        """Bring the reference to the device, and let a callback move it (`sync_ref_model` adds one).

        Call it at the end of the constructor.
        """
        if getattr(self.args, "sync_ref_model", False):
            self.add_callback(SyncRefModelCallback(None, self.accelerator))
        elif not any(isinstance(each, SyncRefModelCallback) for each in self.callback_handler.callbacks):
            reason = "with sync_ref_model=False. Set sync_ref_model=True, or leave it out"
            warn_unread(self.args, SYNC_SETTINGS, reason)
        check_moves(self.callback_handler.callbacks, self.reference, self.model)
        if self.reference is not None:
            self.reference.prepare(self.accelerator)
        self._moved_reference = lend_reference(self.callback_handler.callbacks, self.reference)

    def begin_evaluation(self, dataloader: Any, prefix: str) -> None:
        """With `bf16_full_eval` or `fp16_full_eval` outside of training, cast the reference as the policy will be."""
        super().begin_evaluation(dataloader, prefix)
        is_half = self.args.bf16_full_eval or self.args.fp16_full_eval
        if is_half and not self.is_in_train and self.reference is not None:
            self.reference.cast(torch.float16 if self.args.fp16_full_eval else torch.bfloat16)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._moved_reference is not None:
            self._moved_reference.save(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if self._moved_reference is not None and checkpoint is not None:
            self._moved_reference.load(checkpoint)
