"""Pipelines of diffusers of which one model, or an adapter of it, is trained: parameters, checkpoints, saving."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file
from torch import nn

from trl.checkpoints.wholeness import CheckpointError
from trl.models.peft import require_peft

logger = logging.getLogger(__name__)

LORA_FILE, WEIGHTS_FILE = "pytorch_lora_weights.safetensors", "diffusion_pytorch_model.safetensors"
TARGETS = ["to_k", "to_q", "to_v", "to_out.0"]
ONE_FILE = "10TB"


def import_diffusers() -> Any:
    try:
        import diffusers
    except ImportError as error:
        raise ImportError("Diffusion models need diffusers. Run `pip install 'trl[diffusers,peft]'`.") from error
    return diffusers


class TrainedPipeline:
    """A pipeline of diffusers of which an adapter (`use_lora`) or a whole model is trained: that under the name `part`.

    `pretrained_model_name` is a Hub name, a folder, or the pipeline. LoRA weights beside the model are loaded, and
    `use_lora` is then True. Raises: TypeError for a pipeline that is none of `kinds`.
    """

    part: ClassVar[str] = "unet"
    kinds: ClassVar[tuple[str, ...]] = ("StableDiffusionPipeline",)

    def __init__(
        self, pretrained_model_name: Any, *, pretrained_model_revision: str = "main", use_lora: bool = True
    ) -> None:
        diffusers, pipeline = import_diffusers(), pretrained_model_name
        self.pretrained_model, self.pretrained_revision = pretrained_model_name, pretrained_model_revision
        if isinstance(pipeline, (str, Path)):
            kind = self.kinds[0] if len(self.kinds) == 1 else "DiffusionPipeline"
            pipeline = getattr(diffusers, kind).from_pretrained(pipeline, revision=pretrained_model_revision)
        if not isinstance(pipeline, tuple(getattr(diffusers, kind) for kind in self.kinds)):
            raise TypeError(f"{type(self).__name__} takes a {' or '.join(self.kinds)}, got {type(pipeline).__name__}.")
        self.sd_pipeline = pipeline
        self.use_lora = use_lora
        self._settle()
        self._load_lora()
        for module in pipeline.components.values():
            if isinstance(module, nn.Module):
                module.requires_grad_(module is self.trained and not self.use_lora)

    def _settle(self) -> None:
        """Bring a pipeline that was loaded into the form that trainers need."""

    @property
    def trained(self) -> Any:
        return getattr(self.sd_pipeline, self.part)

    @property
    def autocast(self) -> Callable[[], contextlib.AbstractContextManager[object]] | None:
        """None (the accelerator's), or nothing with LoRA."""
        return contextlib.nullcontext if self.use_lora else None

    def set_progress_bar_config(self, *args: object, **kwargs: object) -> None:
        self.sd_pipeline.set_progress_bar_config(*args, **kwargs)

    def get_trainable_layers(self) -> nn.Module:
        """The model; with LoRA only its adapter (one that it has is kept) is trained, in float32 or wider."""
        model = self.trained
        if not self.use_lora:
            return model
        if not getattr(model, "peft_config", None):
            require_peft()
            from peft import LoraConfig

            config = LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian", target_modules=TARGETS)
            model.add_adapter(config)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
            if "lora_" in name:
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        return model

    def _load_lora(self) -> None:
        """Load the LoRA weights beside the model, if there are any; `use_lora` is then True."""
        name = self.pretrained_model
        if not isinstance(name, (str, Path)):
            return
        try:
            if Path(name).is_dir():
                (Path(name) / LORA_FILE).stat()  # an OSError; diffusers raises another error without peft
            self.sd_pipeline.load_lora_weights(name, weight_name=LORA_FILE, revision=self.pretrained_revision)
            self.use_lora = True
        except OSError:
            if self.use_lora:
                logger.warning("%s has no %s: training starts from a new adapter.", name, LORA_FILE)

    def save_pretrained(self, output_dir: str | Path) -> None:
        """Write the whole pipeline, and the LoRA weights beside it."""
        if getattr(self.trained, "peft_config", None):
            self._save_lora(output_dir)
        with _without_adapter_names(self.trained):
            self.sd_pipeline.save_pretrained(output_dir)

    def save_checkpoint(self, models: list[Any], weights: list[object], output_dir: str) -> None:
        """Write the LoRA weights, or the model into a folder of its name.

        Raises: ValueError unless there is one model.
        """
        (model,) = models
        if self.use_lora:
            self._save_lora(output_dir)
        else:
            model.save_pretrained(Path(output_dir) / self.part, max_shard_size=ONE_FILE)

    def _adapter(self) -> dict[str, torch.Tensor]:
        from peft.utils import get_peft_model_state_dict

        return get_peft_model_state_dict(self.trained, adapter_name=next(iter(self.trained.peft_config)))

    def _save_lora(self, folder: str | Path) -> None:
        config = next(iter(self.trained.peft_config.values())).to_dict()
        known = {f"{self.part}_lora_layers": self._adapter(), f"{self.part}_lora_adapter_metadata": config}
        type(self.sd_pipeline).save_lora_weights(str(folder), **known)

    def load_checkpoint(self, models: list[Any], input_dir: str) -> None:
        """Load what `save_checkpoint` wrote.

        Raises: ValueError unless there is one model; CheckpointError for weights of another model.
        """
        (model,) = models
        file = Path(input_dir) / (LORA_FILE if self.use_lora else f"{self.part}/{WEIGHTS_FILE}")
        loaded = load_file(file) if file.is_file() else {}
        saved = {key.removeprefix(f"{self.part}."): value for key, value in loaded.items()}
        trained = self._adapter() if self.use_lora else model.state_dict()
        if {key: x.shape for key, x in trained.items()} != {key: x.shape for key, x in saved.items()}:
            raise CheckpointError(f"{file} is missing, or of another model. Resume with its model and use_lora.")
        if self.use_lora:
            from peft.utils import set_peft_model_state_dict

            set_peft_model_state_dict(model, saved, adapter_name=next(iter(model.peft_config)))
        else:
            model.load_state_dict(saved)


@contextlib.contextmanager
def _without_adapter_names(model: nn.Module) -> Iterator[None]:
    """A block in which `state_dict` has the model's own names; diffusers (0.42) saves those of peft's layers."""
    every = model.state_dict().items()
    weights = {key.replace(".base_layer.", "."): value for key, value in every if "lora_" not in key}
    model.state_dict = lambda *args, **kwargs: weights
    try:
        yield
    finally:
        del model.state_dict
