"""What the trainers of diffusion models share: precision, optimiser, checkpoints, trackers, model card."""

from __future__ import annotations

import logging
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, ProjectConfiguration, broadcast, set_seed
from huggingface_hub import HfApi
from torch import Tensor, nn

from trl.checkpoints.wholeness import CheckpointError, faults, listed, naming_weights
from trl.models.diffusion.policy import DiffusionPolicy, generator_of
from trl.models.step_state import load_step_state, save_step_state
from trl.models.switches import disable_dropout_in_model
from trl.options.diffusion import DiffusionOptions
from trl.options.training import wrong_config
from trl.reporting.deadlines import AsyncCalls
from trl.reporting.model_card import HERE, generate_model_card
from trl.reporting.trackers import get_comet_experiment_url, get_wandb_run_url

logger = logging.getLogger(__name__)

STATE = "diffusion_state.json"
_CHECKPOINT = re.compile(r"checkpoint_(\d+)")
_FACTS = (
    "train_learning_rate", "sample_num_steps", "sample_eta", "sample_guidance_scale", "sample_batch_size",
    "sample_num_batches_per_epoch", "train_batch_size", "train_gradient_accumulation_steps", "train_num_inner_epochs",
    "train_clip_range", "num_generations", "beta", "seed",
)  # fmt: skip
_USAGE = """from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{place}"){adapter}
pipeline("a lighthouse at dusk").images[0].save("image.png")"""
_ADAPTER = '\npipeline.load_lora_weights("{place}", weight_name="pytorch_lora_weights.safetensors")'
_DISTRIBUTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class DiffusionTrainer:
    """Base of the trainers of diffusion models, which define `step`.

    Noise comes from one random stream per image, so images depend neither on the batch size nor on the number of processes.
    Gradients are averaged over processes once per optimiser step.
    """

    _name: ClassVar[str] = "diffusion"
    _tag_names: ClassVar[list[str]] = ["trl"]
    _paper: ClassVar[dict[str, str]] = {}
    _config_class: ClassVar[type[DiffusionOptions]] = DiffusionOptions
    config: Any

    def __init__(
        self,
        config: Any,
        policy: Callable[[], DiffusionPolicy],
        image_samples_hook: Callable[[Any, Any, Any], Any] | None,
    ) -> None:
        if not isinstance(config, self._config_class):
            raise wrong_config(config, self._config_class)
        if image_samples_hook is None:
            logger.warning("There is no image_samples_hook: no images are logged.")
        self.config, self.image_samples_callback = config, image_samples_hook
        self.policy, self.log_history = policy(), list[dict[str, Any]]()
        project: Any = config.project_kwargs
        self._given_limit = project.get("total_limit")
        self._folder = Path(project.get("project_dir") or config.logdir) / "checkpoints"
        self._checkpoints = list[Path]()  # of this run, the oldest first
        self.accelerator = make_accelerator(config)
        self._start_trackers()
        set_seed(config.seed)  # the adapter's weights are those of every process
        if config.allow_tf32:
            torch.backends.cuda.matmul.allow_tf32 = True
        pipeline = self.policy.pipeline
        pipeline.set_progress_bar_config(disable=True)
        self._place(self.policy.frozen, pipeline)
        self.autocast = pipeline.autocast or self.accelerator.autocast
        layers = pipeline.get_trainable_layers()
        given = list(layers.parameters()) if isinstance(layers, nn.Module) else list(layers)
        self._trained: list[Any] = [each for each in given if each.requires_grad]
        if not self._trained:
            raise ValueError(
                "get_trainable_layers returned no parameter that requires a gradient. Unfreeze some."
            )
        if self.accelerator.num_processes > 1:
            for parameter in self._trained:
                parameter.data = broadcast(parameter.data)
        set_seed(config.seed, device_specific=True)
        self.optimizer: Any = self.accelerator.prepare_optimizer(self._make_optimizer())
        if isinstance(layers, nn.Module):
            disable_dropout_in_model(layers)
            # Not wrapped: the pipeline calls the module itself, and `_update` averages the gradients.
            layers = self.accelerator.prepare_model(layers, evaluation_mode=True)
        self.trainable_layers = layers
        self.accelerator.register_save_state_pre_hook(self._save_model)
        self.accelerator.register_load_state_pre_hook(self._load_model)
        self.first_epoch, self._global_step = 0, 0
        self._loop = AsyncCalls("reward")
        self._warned: set[str] = set()

    # ---- setting up

    def _place(self, frozen: Sequence[Any], pipeline: Any) -> None:
        """Bring all modules to the device; those that are not trained to half precision where it is used."""
        half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.accelerator.mixed_precision)
        for module in [*frozen, self.policy.model]:
            module.eval()
            trains = any(parameter.requires_grad for parameter in module.parameters())
            cast = [] if trains or half is None else [*module.named_parameters(), *module.named_buffers()]
            # As transformers loads a model in float16: T5 overflows otherwise.
            wide = (getattr(module, "_keep_in_fp32_modules", None) or ()) if half == torch.float16 else ()
            for name, value in cast:
                if value.is_floating_point() and not set(wide) & set(name.split(".")):
                    value.data = value.data.to(half)
            module.to(self.accelerator.device)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        config, kind = self.config, torch.optim.AdamW
        if config.train_use_8bit_adam:
            import bitsandbytes

            kind = bitsandbytes.optim.AdamW8bit
        return kind(
            self._trained,
            lr=config.train_learning_rate,
            betas=(config.train_adam_beta1, config.train_adam_beta2),
            weight_decay=config.train_adam_weight_decay,
            eps=config.train_adam_epsilon,
        )

    def _start_trackers(self) -> None:
        config = self.config
        if config.log_with is None:
            return
        settings = {
            name: value if isinstance(value, (bool, int, float, str)) else str(value)
            for name, value in config.to_dict().items()
            if not name.startswith("tracker_kwargs/")  # may hold keys of an account
        }
        given = dict(config.tracker_kwargs)
        if config.run_name and config.log_with == "wandb":
            given["wandb"] = {"name": config.run_name, **given.get("wandb", {})}
        self.accelerator.init_trackers(config.tracker_project_name, config=settings, init_kwargs=given)

    @property
    def sd_pipeline(self) -> Any:
        """The pipeline that is trained."""
        return self.policy.pipeline

    def generators(self, epoch: int, first: int, count: int) -> list[torch.Generator]:
        """The random streams of `count` images of an epoch, which are numbered over all processes."""
        return [generator_of(self.config.seed, epoch, number) for number in range(first, first + count)]

    def _warn_once(self, name: str, message: str, *values: Any) -> None:
        if name not in self._warned:
            self._warned.add(name)
            logger.warning(message, *values)

    # ---- a run

    def step(self, epoch: int, global_step: int) -> int:
        """One epoch; returns the number of optimiser steps so far."""
        raise TypeError(f"{type(self).__name__} does not define step.")

    def train(self, epochs: int | None = None) -> None:
        """Run `step` from the first epoch to `epochs` (default: `num_epochs`); the last epoch is saved too.

        A second call starts at the first epoch again, with the same noise.
        """
        last = (self.config.num_epochs if epochs is None else epochs) - 1
        for epoch in range(self.first_epoch, last + 1):
            self._global_step = self.step(epoch, self._global_step)
        if self.first_epoch <= last and self.config.save_freq and last and last % self.config.save_freq:
            self.save_checkpoint(last, self._global_step)

    def call_reward_function(self, *given: Any) -> Any:
        """What the reward function returns, of an async one what it returns in the end."""
        found = self.reward_fn(*given)  # type: ignore[attr-defined]
        if hasattr(found, "__await__"):
            found = self._loop.outcome(self._loop.submit(found, None))
            if isinstance(found, BaseException):
                raise found
        if not isinstance(found, tuple) or len(found) != 2:
            raise TypeError(
                f"the reward function must return (rewards, metadata), got {type(found).__name__}. Return {{}} for no metadata."
            )
        return found

    def _draw(self, count: int) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """So many prompts with their metadata. Raises TypeError for a prompt function that returns something else."""
        drawn = [self.prompt_fn() for _ in range(count)]  # type: ignore[attr-defined]
        for each in drawn:
            if not isinstance(each, tuple) or len(each) != 2 or not isinstance(each[0], str):
                raise TypeError(f"prompt_function must return (prompt, metadata) with a text, got {each!r}.")
        prompts, metadata = zip(*drawn, strict=True)
        return prompts, metadata

    def _checked_images(self, images: Tensor) -> Tensor:
        """Images in float32 or wider, as rewards are computed from them.

        Warns once of those that are black: a safety checker blanks images, and their rewards teach nothing.

        Raises: FloatingPointError for images that are not finite.
        """
        if not images.isfinite().all():
            raise FloatingPointError(
                "images must be finite: the decoder overflows, or the weights do. Set mixed_precision='bf16' or 'no'."
            )
        blank = int((images.flatten(1).amax(dim=1) <= 0).sum())
        if blank:
            self.blank_images += blank
            self._warn_once(
                "blank",
                "%d of %d images are black, as a safety checker makes them. Turn it off, or reward such images as you mean "
                "to. Logged once; counted as blank_images.",
                blank,
                len(images),
            )
        return images.to(torch.promote_types(images.dtype, torch.float32))

    blank_images = 0
    """Images of this process that were black so far."""

    def _update(self, step: int) -> None:
        """Average the gradients over processes, clip them, and let the optimiser step.

        Raises: FloatingPointError for a gradient that is not finite; float16's scaler skips such a step instead.
        """
        if self.accelerator.num_processes > 1:
            for parameter in self._trained:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad = self.accelerator.reduce(parameter.grad, reduction="mean")
        norm = self.accelerator.clip_grad_norm_(self._trained, self.config.train_max_grad_norm)
        if self.accelerator.scaler is None and not math.isfinite(float(norm)):  # type: ignore[arg-type]
            raise FloatingPointError(
                f"the gradient's norm must be finite, got {float(norm)} in optimiser step {step + 1}. No update was made with it. "  # type: ignore[arg-type]
                "Lower train_learning_rate, check the rewards, or set mixed_precision='bf16' or 'no'."
            )
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _mean(self, values: Sequence[Tensor]) -> float:
        """The mean of numbers of all processes, which have as many each."""
        mean = torch.stack([value.detach().float() for value in values]).mean()
        return float(self.accelerator.reduce(mean, reduction="mean"))  # type: ignore[arg-type]

    def log(self, values: dict[str, Any], step: int) -> None:
        """Send values to the trackers, and to `log_history` without arrays."""
        counts = {"blank_images": self.blank_images, "cut_prompts": getattr(self.policy, "cut_prompts", 0)}
        values |= {name: count for name, count in counts.items() if count}
        self.accelerator.log(values, step=step)
        self.log_history.append(
            {name: v for name, v in values.items() if isinstance(v, (int, float))} | {"step": step}
        )

    def _show_images(self, images: Any, step: int) -> None:
        if self.image_samples_callback is not None:
            tracker = self.accelerator.trackers[0] if self.accelerator.trackers else None
            self.image_samples_callback(images, step, tracker)

    # ---- checkpoints

    def carried(self) -> dict[str, Any]:
        """What a method carries from epoch to epoch, as JSON values."""
        return {}

    def load_carried(self, state: dict[str, Any]) -> None:
        """Restore `carried`."""

    def save_checkpoint(self, epoch: int, global_step: int) -> Path:
        """Write `checkpoint_<epoch>`, whole or not at all, and remove this run's oldest above the limit.

        All processes must call it.
        """
        folder = self._folder / f"checkpoint_{epoch}"
        state = {"method": self._name, "epoch": epoch, "global_step": global_step, "carried": self.carried()}
        folder.parent.mkdir(parents=True, exist_ok=True)
        save_step_state(folder, self.accelerator, state, file=STATE)
        kept = [*(each for each in self._checkpoints if each != folder), folder]
        self._checkpoints = kept[-(self._given_limit or self.config.num_checkpoint_limit) :]
        if self.accelerator.is_main_process:
            for old in kept[: -len(self._checkpoints)]:
                shutil.rmtree(old, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        return folder

    def _save_model(self, models: list[Any], weights: list[Any], folder: str) -> None:
        """The pipeline's `save_checkpoint` on the main process; accelerate then writes no weights itself."""
        if self.accelerator.is_main_process:
            self.sd_pipeline.save_checkpoint(models, weights, folder)
        weights.clear()

    def _load_model(self, models: list[Any], folder: str) -> None:
        """The pipeline's `load_checkpoint`; accelerate then loads no weights itself."""
        self.sd_pipeline.load_checkpoint(models, folder)
        models.clear()

    def _save_if_due(self, epoch: int, global_step: int) -> None:
        frequency = self.config.save_freq
        if frequency and epoch and epoch % frequency == 0:
            self.save_checkpoint(epoch, global_step)

    def resume(self) -> None:
        """Load the checkpoint that `resume_from` means, if any.

        Warns of checkpoints in the run's folder that are not its own.

        Raises: ValueError where there is none; CheckpointError for one of another model or method, and where none is whole.
        """
        if self.config.resume_from:
            self._resume()
        others = [each.name for each in checkpoints_in(self._folder) if each not in self._checkpoints]
        if others and self.config.save_freq:
            logger.warning(
                "%s has checkpoints of another run, or later than the one resumed from (%s). They are kept, but replaced where this "
                "run saves the same epoch, and resume_from=%r would take the last of all. Set another project_dir in "
                "project_kwargs.",
                self._folder,
                ", ".join(others),
                str(self._folder),
            )

    def _resume(self) -> None:
        given = Path(self.config.resume_from).expanduser()
        inner = given / "checkpoints"
        own = _CHECKPOINT.fullmatch(given.name) is not None
        found = [given] if own else checkpoints_in(given) or checkpoints_in(inner)
        if not found or not found[0].is_dir():
            raise ValueError(
                f"resume_from={str(given)!r} has no checkpoint_N folder. Give one, or '' to start anew."
            )
        folder, state = self._load_first(found)
        if state["method"] != self._name:
            raise CheckpointError(f"{folder} is of a run of {state['method']}, and this is {self._name}.")
        self.first_epoch, self._global_step = state["epoch"] + 1, state["global_step"]
        self.load_carried(state["carried"])
        if folder.parent.resolve() == self._folder.resolve():
            earlier = [each for each in checkpoints_in(self._folder) if epoch_of(each) <= state["epoch"]]
            self._checkpoints = earlier[::-1]

    def _load_first(self, folders: list[Path]) -> tuple[Path, dict[str, Any]]:
        """The first checkpoint that is whole, with its state."""
        for folder in folders[:-1]:
            if missing := faults(folder, needed={STATE: (STATE,)}):
                logger.warning("%s is not whole (%s): resuming from an earlier one.", folder, listed(missing))
                continue
            folders = [folder]
            break
        with naming_weights(folders[-1]):
            return folders[-1], load_step_state(folders[-1], self.accelerator, file=STATE)

    # ---- the trained model

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        repo_id: str | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> str | None:
        """Write the pipeline and the model card into a folder; `push_to_hub` uploads it, and returns its address."""
        if not self.accelerator.is_main_process:
            return None
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        self.sd_pipeline.save_pretrained(str(save_directory))
        self._card(None, None, None).save(Path(save_directory) / "README.md")
        if not push_to_hub:
            return None
        api, name = HfApi(token=kwargs.pop("token", None)), repo_id or Path(save_directory).name
        made = api.create_repo(name, private=kwargs.pop("private", None), exist_ok=True)
        return str(api.upload_folder(folder_path=str(save_directory), repo_id=made.repo_id, **kwargs))

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> str | None:
        """Upload pipeline and model card; `kwargs` are those of `HfApi.upload_folder`, with `token` and `private`."""
        with tempfile.TemporaryDirectory() as folder:
            return self.save_pretrained(folder, repo_id=repo_id, push_to_hub=True, **kwargs)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ) -> None:
        """Write `README.md` into the project's folder."""
        if self.accelerator.is_main_process:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            self._card(model_name, dataset_name, tags).save(self._folder.parent / "README.md")

    def _card(self, model_name: str | None, dataset_name: str | None, tags: str | list[str] | None) -> Any:
        config, base = self.config, getattr(self.sd_pipeline, "pretrained_model", None)
        facts = {name: getattr(config, name) for name in _FACTS if hasattr(config, name)}
        adapter = _ADAPTER.format(place=HERE) if getattr(self.sd_pipeline, "use_lora", False) else ""
        card = generate_model_card(
            base_model=str(base) if isinstance(base, (str, Path)) else None,
            model_name=model_name or config.run_name or self._folder.parent.resolve().name,
            hub_model_id=HERE,
            dataset_name=dataset_name,
            tags=[*self._tag_names, *([tags] if isinstance(tags, str) else tags or [])],
            wandb_url=get_wandb_run_url(),
            comet_url=get_comet_experiment_url(),
            trainer_name=self._name,
            trainer_citation=self._paper.get("citation"),
            paper_title=self._paper.get("title"),
            paper_id=self._paper.get("id"),
            training_facts=facts | {"optimiser steps": self._global_step},
            usage=_USAGE.format(place=HERE, adapter=adapter),
        )
        card.data.library_name = "diffusers"  # type: ignore[attr-defined]
        return card


def make_accelerator(config: Any) -> Accelerator:
    """The accelerator of a config, in float32 where float16 is not to be had.

    Raises: ValueError for FSDP and DeepSpeed, and for gradient accumulation of accelerate's.
    """
    options, precision = dict(config.accelerator_kwargs), config.mixed_precision
    has_gpu = torch.accelerator.is_available() and not options.get("cpu")
    if precision == "fp16" and not has_gpu:
        precision = "no"
        logger.warning(
            "mixed_precision='fp16' needs a GPU: this run computes in float32. Set 'no' or 'bf16'."
        )
    if not has_gpu and options.get("cpu", True):
        PartialState(cpu=True)  # connects the processes that torchrun starts on a CPU
    logging_dir = config.project_kwargs.get("project_dir") or config.logdir
    project = {"logging_dir": logging_dir, **config.project_kwargs}
    for name in ("automatic_checkpoint_naming", "total_limit"):  # checkpoints are named and removed here
        project.pop(name, None)
    AcceleratorState._reset_state()  # a process may train several models; TrainingArguments does the same
    accelerator = Accelerator(
        log_with=config.log_with,
        mixed_precision=options.pop("mixed_precision", precision),
        project_config=ProjectConfiguration(**project),
        **options,
    )
    if accelerator.distributed_type not in _DISTRIBUTED:
        raise ValueError(
            f"diffusion models train on one device or by data parallelism, got {accelerator.distributed_type.value}. Launch "
            "without FSDP and DeepSpeed."
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps of the Accelerator must be 1, got {accelerator.gradient_accumulation_steps}: it would "
            "divide gradients that are means already. Set train_gradient_accumulation_steps."
        )
    return accelerator


def checkpoints_in(folder: Path) -> list[Path]:
    """All `checkpoint_<epoch>` folders, the last first."""
    found = [path for path in folder.glob("checkpoint_*") if _CHECKPOINT.fullmatch(path.name)]
    return sorted(found, key=epoch_of, reverse=True)


def epoch_of(folder: Path) -> int:
    """The N of a `checkpoint_N` folder."""
    return int(folder.name.removeprefix("checkpoint_"))
