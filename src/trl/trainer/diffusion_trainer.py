"""What the trainers of diffusion models share: precision, optimiser, checkpoints, trackers, model card."""

import logging
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import broadcast, set_seed
from huggingface_hub import HfApi
from torch import Tensor, nn
from transformers import PrinterCallback, TrainerState

from trl.checkpoints.wholeness import CheckpointError, checkpoints_in, faults, listed
from trl.models.diffusion.policy import generator_of
from trl.models.step_state import load_step_state, save_step_state
from trl.models.switches import disable_dropout_in_model
from trl.options.diffusion import DiffusionOptions
from trl.options.groups import names_checked
from trl.options.shared import changed_settings
from trl.options.training import wrong_config
from trl.reporting.deadlines import AsyncCalls
from trl.reporting.model_card import HERE, Paper, card_of_run
from trl.reporting.run_lines import RunLines
from trl.reporting.trackers import start_trackers
from trl.rewards.result import refusing_exit
from trl.trainer.callbacks.run_report import begin, log_facts
from trl.trainer.diffusion_setup import make_accelerator, make_optimizer, make_policy, place_modules

logger = logging.getLogger(__name__)

RewardFunction = Callable[[Tensor, tuple[str, ...], tuple[Any, ...]], Any]
PromptFunction = Callable[[], tuple[str, Any]]
ImageHook = Callable[[Any, Any, Any], Any]

TAGS = ("diffusers", "reinforcement-learning", "text-to-image")
STATE, STEM = "diffusion_state.json", "checkpoint_"
_FACTS = ("sample_", "train_", "truncated_", "noise_level", "num_generations", "beta", "seed")
_USAGE = """from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{place}"){adapter}
pipeline("a lighthouse at dusk").images[0].save("image.png")"""
_ADAPTER = '\npipeline.load_lora_weights("{place}", weight_name="pytorch_lora_weights.safetensors")'


class DiffusionTrainer:
    """Base of the trainers of diffusion models, which define `step`.

    Noise comes from one random stream per image, so images depend neither on the batch size nor on the number of
    processes. Gradients are averaged over processes once per optimiser step.
    """

    _name: ClassVar[str] = "diffusion"
    _tag_names: ClassVar[list[str]] = ["trl"]
    _paper: ClassVar[Paper | None] = None
    _config_class: ClassVar[type[DiffusionOptions]] = DiffusionOptions
    config: Any

    @names_checked
    def __init__(
        self,
        config: Any,
        reward_function: RewardFunction | None,
        prompt_function: PromptFunction | None,
        sd_pipeline: Any,
        image_samples_hook: ImageHook | None = None,
    ) -> None:
        if not isinstance(config, self._config_class):
            raise wrong_config(config, self._config_class)
        for name, function in (("reward_function", reward_function), ("prompt_function", prompt_function)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be a function, got {function!r}.")
        if image_samples_hook is None:
            logger.warning("There is no image_samples_hook: no images are logged.")
        self.config, self.image_samples_callback = config, image_samples_hook
        self.reward_fn: Any = reward_function
        self.prompt_fn: Any = prompt_function
        self.policy, self.log_history = make_policy(sd_pipeline, config), list[dict[str, Any]]()
        project: Any = config.project_kwargs
        self._limit = project.get("total_limit") or config.num_checkpoint_limit
        self._folder = Path(project.get("project_dir") or config.logdir).absolute() / "checkpoints"
        self._checkpoints = list[Path]()  # of this run, the oldest first
        self.accelerator = make_accelerator(config)
        start_trackers(self.accelerator, config)
        set_seed(config.seed)  # the adapter's weights are those of every process
        if config.allow_tf32:
            torch.backends.cuda.matmul.allow_tf32 = True
        self.sd_pipeline = pipeline = self.policy.pipeline
        pipeline.set_progress_bar_config(disable=True)
        self.autocast = pipeline.autocast or self.accelerator.autocast
        layers = pipeline.get_trainable_layers()
        place_modules([*self.policy.frozen, self.policy.model], self.accelerator)
        parameters = list(layers.parameters()) if isinstance(layers, nn.Module) else list(layers)
        self._trained: list[Any] = [parameter for parameter in parameters if parameter.requires_grad]
        if not self._trained:
            raise ValueError("get_trainable_layers returned no parameter that requires a gradient. Unfreeze some.")
        for parameter in self._trained:
            parameter.data = broadcast(parameter.data)  # type: ignore[assignment]
        set_seed(config.seed, device_specific=True)
        self.optimizer: Any = self.accelerator.prepare_optimizer(make_optimizer(self._trained, config))
        disable_dropout_in_model(self.policy.model)
        if isinstance(layers, nn.Module):
            # Not wrapped: the pipeline calls the module itself, and `_update` averages the gradients.
            layers = self.accelerator.prepare_model(layers, evaluation_mode=True)
        self.trainable_layers = layers
        self.accelerator.register_save_state_pre_hook(self._save_model)
        self.accelerator.register_load_state_pre_hook(self._load_model)
        self.first_epoch, self._global_step, self.blank_images, self._images = 0, 0, 0, 0
        self._loop = AsyncCalls("reward")
        self.neg_prompt_embed = self.policy.negative[0]
        self.set_up()
        self.resume()

    def set_up(self) -> None:
        """What a method needs before a checkpoint is loaded."""

    def generators(self, epoch: int, first: int, count: int) -> list[torch.Generator]:
        """The random streams of `count` images of an epoch, which are numbered over all processes."""
        return [generator_of(self.config.seed, epoch, number) for number in range(first, first + count)]

    # ---- a run

    def step(self, epoch: int, global_step: int) -> int:
        """One epoch; returns the number of optimiser steps so far."""
        raise TypeError(f"{type(self).__name__} does not define step.")

    def train(self, epochs: int | None = None) -> None:
        """Run `step` from the first epoch to `epochs` (default: `num_epochs`); the last epoch is saved too.

        A line for each epoch has its reward and loss. A second call starts at the first epoch, with the same noise.
        """
        last = (self.config.num_epochs if epochs is None else epochs) - 1
        frequency = self.config.save_freq
        images = self._images
        lines = PrinterCallback() if self.config.log_format == "dict" else RunLines("images")
        state: Any = TrainerState(global_step=self.first_epoch, max_steps=last + 1)
        state.is_world_process_zero = self.accelerator.is_main_process
        state.is_local_process_zero = state.is_world_process_zero
        lines.on_train_begin(None, state, None)  # type: ignore[arg-type]
        events = begin(
            self._folder.parent if frequency else None, self._name, self.policy.model, self.accelerator, run=self._name,
            settings=changed_settings(self.config), step=self.first_epoch, steps=last + 1,
        )  # fmt: skip
        with ExitStack() as stack:
            stack.push(lambda kind, error, _: events.stop(state.global_step, error))
            for epoch in range(self.first_epoch, last + 1):
                before = len(self.log_history)
                self._global_step = self.step(epoch, self._global_step)
                logged = {name: value for entry in self.log_history[before:] for name, value in entry.items()}
                logged["reward"] = logged.get("reward", logged.get("reward_mean"))
                state.global_step, logged["num_images"] = epoch + 1, self._images - images
                lines.on_log(None, state, None, logs=logged)
                events.write("log", epoch + 1, **log_facts(logged))
                if frequency and (epoch == last or (epoch and epoch % frequency == 0)):
                    self.save_checkpoint(epoch, self._global_step)
            events.write("end", last + 1)
        if isinstance(lines, RunLines):
            lines.on_log(None, state, None, logs={"train_loss": math.nan})  # ends the run

    def call_reward_function(self, *given: Any) -> Any:
        """What the reward function returns, of an async one what it returns in the end."""
        with refusing_exit():
            found = self.reward_fn(*given)
            if hasattr(found, "__await__"):
                found = self._loop.outcome(self._loop.submit(found, None))
                if isinstance(found, BaseException):
                    raise found
        if not isinstance(found, tuple) or len(found) != 2:
            raise TypeError(
                f"the reward function must return (rewards, metadata), got {type(found).__name__}. Return {{}} for no "
                "metadata."
            )
        return found

    def _draw(self, count: int) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """So many prompts with their metadata. Raises TypeError for a prompt function that returns something else."""
        drawn = [self.prompt_fn() for _ in range(count)]
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
        if blank and not self.blank_images:
            logger.warning(
                "%d of %d images are black, as a safety checker makes them. Turn it off, or reward such images as you "
                "mean to. Logged once; counted as blank_images.",
                blank, len(images),
            )  # fmt: skip
        self.blank_images += blank
        self._images += len(images) * self.accelerator.num_processes
        return images.to(torch.promote_types(images.dtype, torch.float32))

    def loss(self, advantages: Tensor, clip_range: float, ratio: Tensor) -> Tensor:
        """PPO's clipped surrogate, a mean over the batch; not part of AlignProp."""
        clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
        return torch.maximum(-advantages * ratio, -advantages * clipped).mean()

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
                f"the gradient's norm must be finite, got {norm:g} in optimiser step {step + 1}. No update was made "
                "with it. Lower train_learning_rate, check the rewards, or set mixed_precision='bf16' or 'no'."
            )
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _mean(self, values: Sequence[Tensor]) -> float:
        """The mean of numbers of all processes, which have as many each."""
        mean = torch.stack([value.detach().float() for value in values]).mean()
        return float(self.accelerator.reduce(mean, reduction="mean"))  # type: ignore[arg-type]

    def log(self, values: dict[str, Any], step: int) -> None:
        """Send values to the trackers, and to `log_history` without arrays."""
        counts = {"blank_images": self.blank_images, "cut_prompts": self.policy.cut_prompts}
        values |= {name: count for name, count in counts.items() if count}
        self.accelerator.log(values, step=step)
        self.log_history.append({name: v for name, v in values.items() if isinstance(v, (int, float))} | {"step": step})

    def _show_images(self, images: object, step: int) -> None:
        if self.image_samples_callback is not None and self.accelerator.is_main_process:  # it has the tracker
            tracker = self.accelerator.trackers[0] if self.accelerator.trackers else None
            self.image_samples_callback(images, step, tracker)

    # ---- checkpoints

    def carried(self) -> dict[str, object]:
        """What a method carries from epoch to epoch, as JSON values."""
        return {}

    def load_carried(self, state: Mapping[str, Any]) -> None:
        """Restore `carried`."""

    def save_checkpoint(self, epoch: int, global_step: int) -> Path:
        """Write `checkpoint_<epoch>`, whole or not at all, and remove this run's oldest above the limit.

        All processes must call it.
        """
        folder = self._folder / f"{STEM}{epoch}"
        state = {"method": self._name, "epoch": epoch, "global_step": global_step, "carried": self.carried()}
        folder.parent.mkdir(parents=True, exist_ok=True)
        save_step_state(folder, self.accelerator, state, file=STATE)
        kept = [*(each for each in self._checkpoints if each != folder), folder]
        self._checkpoints = kept[-self._limit :]
        if self.accelerator.is_main_process:
            for old in kept[: -len(self._checkpoints)]:
                shutil.rmtree(old, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        return folder

    def _save_model(self, models: list[nn.Module], weights: list[object], folder: str) -> None:
        """The pipeline's `save_checkpoint` on the main process; accelerate then writes no weights itself."""
        if self.accelerator.is_main_process:
            self.sd_pipeline.save_checkpoint(models, weights, folder)
        weights.clear()

    def _load_model(self, models: list[nn.Module], folder: str) -> None:
        """The pipeline's `load_checkpoint`; accelerate then loads no weights itself."""
        self.sd_pipeline.load_checkpoint(models, folder)
        models.clear()

    def resume(self) -> None:
        """Load the checkpoint that `resume_from` means, if any.

        Warns of checkpoints in the run's folder that are not its own.

        Raises: ValueError where there is none, and for another number of processes; CheckpointError for one of another
        model or method, and where none is whole.
        """
        there = checkpoints_in(self._folder, STEM)
        if self.config.resume_from:
            loaded = self._load().resolve()
            newest = next((n for n, each in enumerate(there) if each.resolve() == loaded), len(there))
            self._checkpoints = there[newest:][::-1]
        others = [each.name for each in there if each not in self._checkpoints]
        if others and self.config.save_freq:
            logger.warning(
                "%s has checkpoints of another run, or later than the one resumed from (%s). They are kept, but "
                "replaced where this run saves the same epoch, and resuming from the folder takes the last of all. Set "
                "another project_dir in project_kwargs.",
                self._folder, ", ".join(others),
            )  # fmt: skip

    def _load(self) -> Path:
        """Load the newest whole checkpoint of `resume_from`, and return its folder."""
        given = Path(self.config.resume_from).expanduser()
        own = [each for each in checkpoints_in(given.parent, STEM) if each.name == given.name]
        found = own or checkpoints_in(given, STEM) or checkpoints_in(given / "checkpoints", STEM)
        if not found:
            raise ValueError(f"resume_from={str(given)!r} has no checkpoint_N folder. Give one, or '' to start anew.")
        needed = {STATE: (STATE,)}
        folder = next((each for each in found if not faults(each, needed=needed)), None)
        if folder is None:
            why = listed(faults(found[0], needed=needed))
            raise CheckpointError(f"{found[0]} is not whole: {why}. Give another, or '' to start anew.")
        if folder != found[0]:
            logger.warning("%s is not whole: resuming from %s.", found[0], folder)
        state = load_step_state(folder, self.accelerator, file=STATE)
        if state["method"] != self._name:
            raise CheckpointError(f"{folder} is of a run of {state['method']}, and this is {self._name}.")
        self.first_epoch, self._global_step = state["epoch"] + 1, state["global_step"]
        self.load_carried(state["carried"])
        return folder

    # ---- the trained model

    def save_pretrained(
        self, save_directory: str | Path, *, repo_id: str | None = None, push_to_hub: bool = False, **kwargs: Any
    ) -> str | None:
        """Write the pipeline and the model card into a folder; `push_to_hub` uploads it, and returns its address."""
        if not self.accelerator.is_main_process:
            return None
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        self.sd_pipeline.save_pretrained(str(save_directory))
        place, name = HERE, repo_id or Path(save_directory).resolve().name
        api = HfApi(token=kwargs.pop("token", None))
        if push_to_hub:
            place = api.create_repo(name, private=kwargs.pop("private", None), exist_ok=True).repo_id
        self._card(name.rpartition("/")[2], place=place).save(Path(save_directory) / "README.md")
        if not push_to_hub:
            return None
        return str(api.upload_folder(folder_path=str(save_directory), repo_id=place, **kwargs))

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> str | None:
        """Upload pipeline and model card; `kwargs` are those of `HfApi.upload_folder`, with `token` and `private`."""
        with tempfile.TemporaryDirectory() as folder:
            return self.save_pretrained(folder, repo_id=repo_id, push_to_hub=True, **kwargs)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write `README.md` into the project's folder."""
        if self.accelerator.is_main_process:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            card = self._card(model_name, dataset_name=dataset_name, tags=tags)
            card.save(self._folder.parent / "README.md")

    def _card(self, model_name: str | None, place: str = HERE, **given: Any) -> Any:
        config, model = self.config, getattr(self.sd_pipeline, "sd_pipeline", self.sd_pipeline)
        base = getattr(getattr(model, "config", None), "_name_or_path", None)
        facts = {name: value for name, value in vars(config).items() if name.startswith(_FACTS)}
        adapter = _ADAPTER.format(place=place) if getattr(self.sd_pipeline, "use_lora", False) else ""
        card: Any = card_of_run(
            self,
            base_model=str(base) if base else None,
            model_name=model_name or config.run_name or self._folder.parent.resolve().name,
            hub_model_id=place,
            training_facts=facts | {"optimiser steps": self._global_step},
            usage=_USAGE.format(place=place, adapter=adapter),
            **{"dataset_name": None, "tags": None, **given},
        )
        card.data.library_name = "diffusers"
        return card
