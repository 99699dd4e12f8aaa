"""Pipelines of diffusers of which one model, or an adapter of it, is trained: parameters, checkpoints, saving."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file
from torch import nn

from trl.checkpoints.wholeness import CheckpointError

logger = logging.getLogger(__name__)

LORA_FILE = "pytorch_lora_weights.safetensors"
TARGETS = ["to_k", "to_q", "to_v", "to_out.0"]
ONE_FILE = "10TB"


def import_diffusers() -> Any:
    """The package. Raises ImportError with the install command."""
    try:
        import diffusers
    except ImportError as error:
        raise ImportError(
            "Diffusion models need diffusers. Install it with `pip install trl[diffusers,peft]`."
        ) from error
    return diffusers


class TrainedPipeline:
    """What trainers need of a pipeline of diffusers; `part` is the name of the model that is trained in it."""

    part: ClassVar[str] = "unet"
    sd_pipeline: Any
    pretrained_model: Any
    pretrained_revision: str
    use_lora: bool

    @property
    def trained(self) -> Any:
        """The model that is trained."""
        return getattr(self.sd_pipeline, self.part)

    @property
    def autocast(self) -> Callable[[], Any] | None:
        """None (the accelerator's), or nothing with LoRA."""
        return contextlib.nullcontext if self.use_lora else None

    def set_progress_bar_config(self, *args: Any, **kwargs: Any) -> None:
        """Passed on to diffusers."""
        self.sd_pipeline.set_progress_bar_config(*args, **kwargs)

    def get_trainable_layers(self) -> nn.Module:
        """The model; with LoRA its adapter alone can be trained, whose weights are float32 or wider. An adapter that it has is kept."""
        model = self.trained
        if not self.use_lora:
            return model
        if not getattr(model, "peft_config", None):
            from peft import LoraConfig

            model.add_adapter(
                LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian", target_modules=TARGETS)
            )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
            if "lora_" in name:
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        return model

    def _load_lora(self) -> None:
        """Load the LoRA weights beside the model, if there are any; `use_lora` is then True."""
        name = self.pretrained_model
        if not isinstance(name, (str, Path)) or (
            Path(name).is_dir() and not (Path(name) / LORA_FILE).exists()
        ):
            return
        try:
            self.sd_pipeline.load_lora_weights(name, weight_name=LORA_FILE, revision=self.pretrained_revision)
            self.use_lora = True
        except OSError:
            if self.use_lora:
                logger.warning(
                    "%s has no LoRA weights (%s): training starts from a new adapter.", name, LORA_FILE
                )

    def save_pretrained(self, output_dir: str | Path) -> None:
        """Write the whole pipeline, and the LoRA weights beside it."""
        if getattr(self.trained, "peft_config", None):
            self._save_lora(output_dir)
        with _without_adapter_names(self.trained):
            self.sd_pipeline.save_pretrained(output_dir)

    def save_checkpoint(self, models: list[Any], weights: list[Any], output_dir: str) -> None:
        """Write the LoRA weights, or the model into a folder of its name.

        Raises: ValueError unless there is one model.
        """
        model = _only(models)
        if self.use_lora:
            self._save_lora(output_dir)
        else:
            model.save_pretrained(Path(output_dir) / self.part, max_shard_size=ONE_FILE)

    def _save_lora(self, folder: str | Path) -> None:
        from peft.utils import get_peft_model_state_dict

        adapter, config = next(iter(self.trained.peft_config.items()))
        known = {
            f"{self.part}_lora_layers": get_peft_model_state_dict(self.trained, adapter_name=adapter),
            f"{self.part}_lora_adapter_metadata": config.to_dict(),
        }
        type(self.sd_pipeline).save_lora_weights(str(folder), **known)

    def load_checkpoint(self, models: list[Any], input_dir: str) -> None:
        """Load what `save_checkpoint` wrote.

        Raises: ValueError unless there is one model; CheckpointError for weights of another model.
        """
        model = _only(models)
        own, load, prefix = model.state_dict(), model.load_state_dict, ""
        file = Path(input_dir) / self.part / "diffusion_pytorch_model.safetensors"
        if self.use_lora:
            from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict

            adapter, file = next(iter(model.peft_config)), Path(input_dir) / LORA_FILE
            own, prefix = get_peft_model_state_dict(model, adapter_name=adapter), f"{self.part}."

            def load(saved: dict[str, Any]) -> None:
                set_peft_model_state_dict(model, saved, adapter_name=adapter)

        if not file.is_file():
            raise CheckpointError(
                f"{file} is missing. Resume with the use_lora that the checkpoint was saved with."
            )
        saved = {key.removeprefix(prefix): value for key, value in load_file(file).items()}
        if {key: value.shape for key, value in own.items()} != {
            key: value.shape for key, value in saved.items()
        }:
            raise CheckpointError(
                f"{file} is of another model. Resume with the model that was trained there."
            )
        load(saved)


def _only(models: list[Any]) -> Any:
    if len(models) != 1:
        raise ValueError(f"a pipeline trains one model, got {len(models)}. Save and load others yourself.")
    return models[0]


@contextlib.contextmanager
def _without_adapter_names(model: Any) -> Iterator[None]:
    """A block in which `state_dict` has the model's own weights by their own names: diffusers (0.42) saves those of peft's layers."""
    own = {
        key.replace(".base_layer.", "."): value
        for key, value in model.state_dict().items()
        if "lora_" not in key
    }
    model.state_dict = lambda *args, **kwargs: own
    try:
        yield
    finally:
        del model.state_dict
