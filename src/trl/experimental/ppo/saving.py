"""Checkpoints of a policy with its value model: the policy as it is loaded by itself, the value model in a folder beside."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from trl.checkpoints.wholeness import naming_weights
from trl.models.loading import load_saved_weights
from trl.models.parts import causal_core
from trl.models.scoring.values import POLICY, VALUE, PolicyAndValue
from trl.trainer.base_trainer import BaseTrainer
from trl.trainer.online_trainer import OnlineTrainer

VALUE_FOLDER = "value_model"


class SavesBoth(OnlineTrainer):
    """An `OnlineTrainer` of a `PolicyAndValue`."""

    _is_checkpoint = False

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy, to be loaded with `from_pretrained`; checkpoints also hold the value model."""
        # transformers writes checkpoints into a folder that it names, and what it is about to push into the run's own.
        self._is_checkpoint = _internal_call and output_dir is not None
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        both, folder = self._both(), output_dir if output_dir is not None else self.args.output_dir
        assert folder is not None
        with self._in_place_of_both(both.policy):
            super()._save(output_dir, _part(state_dict, POLICY))
        if self._is_checkpoint:
            value_model: Any = both.value_model
            where = os.path.join(folder, VALUE_FOLDER)
            value_model.save_pretrained(where, state_dict=_part(state_dict, VALUE))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        both, folder = self._both(), os.path.join(resume_from_checkpoint, VALUE_FOLDER)
        if not os.path.isdir(folder):
            raise FileNotFoundError(
                f"{resume_from_checkpoint} has no folder {VALUE_FOLDER!r}, expected the value model in it. Resume from a "
                "checkpoint of this trainer, or start anew from its policy."
            )
        with self._in_place_of_both(both.policy):
            super()._load_from_checkpoint(resume_from_checkpoint)
        self._weights_are_renamed = False
        with naming_weights(folder):
            with self._in_place_of_both(both.value_model):
                super(BaseTrainer, self)._load_from_checkpoint(folder)
            if self._weights_are_renamed:
                load_saved_weights(causal_core(both.value_model), folder)

    @contextmanager
    def _in_place_of_both(self, model: nn.Module) -> Iterator[None]:
        """Let one of the two models be the trainer's for a while: transformers asks it what it is."""
        kept, self.model = self.model, model  # type: ignore[assignment]
        try:
            yield
        finally:
            self.model = kept

    def _load_best_model(self) -> None:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            super()._load_best_model()
            return
        assert self.state.best_model_checkpoint is not None
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _both(self) -> PolicyAndValue:
        both = self.accelerator.unwrap_model(self.model)
        assert isinstance(both, PolicyAndValue)
        return both


def _part(state: dict[str, Any] | None, prefix: str) -> dict[str, Any] | None:
    """The entries under a prefix, without it."""
    if state is None:
        return None
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
