"""`TrainingArguments` with the defaults that all trainers of the library share, and options of trainers over rows."""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeVar

import torch
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames
from transformers.utils import is_torch_bf16_gpu_available

from trl.options.checks import CHECKPOINTING, JSONDict, Settings, json_object, warn_caller
from trl.options.groups import OptionGroup, moved, option, same
from trl.options.model import DTYPES
from trl.options.secrets import redacted, unwritten
from trl.options.shared import Weights, shared
from trl.options.spelling import did_you_mean

Config = TypeVar("Config")

RESUME_PARTS = {"optimizer", "random_state", "progress"}
_HALF = "mixed precision is PyTorch's autocast."
_TPU = "accelerate launch sets TPUs up."
_DEVICE = "the accelerator of the machine is used where there is one."
_DROPPED = "transformers 5 cannot do this any more."


@dataclass
class LegacyTrainingArguments(OptionGroup):
    """Names that documents of the 0.x levels use and transformers 5 no longer has."""

    warmup_ratio: float | None = moved("now warmup_steps, also a share.", "[0, 1)", to="warmup_steps")
    evaluation_strategy: str | None = moved(to="eval_strategy")
    no_cuda: bool | None = moved(to="use_cpu")
    group_by_length: bool | None = moved(
        to="train_sampling_strategy", value_of=lambda config, value: "group_by_length" if value else "random"
    )
    adafactor: bool | None = moved(
        "now optim='adafactor'.", to="optim", value_of=lambda config, value: "adafactor" if value else None
    )
    include_inputs_for_metrics: bool | None = moved(
        to="include_for_metrics",
        value_of=lambda config, value: [*config.include_for_metrics, "inputs"] if value else None,
    )
    push_to_hub_model_id: str | None = moved(to="hub_model_id")
    push_to_hub_organization: str | None = moved(
        "now part of hub_model_id.",
        to="hub_model_id",
        value_of=lambda config, value: f"{value}/{Path(config.hub_model_id or config.output_dir).name}",
    )
    push_to_hub_token: str | None = moved(to="hub_token")
    torchdynamo: str | None = moved(to="torch_compile_backend")
    per_gpu_train_batch_size: int | None = moved(to="per_device_train_batch_size")
    per_gpu_eval_batch_size: int | None = moved(to="per_device_eval_batch_size")
    overwrite_output_dir: bool | None = moved("an output directory is always written into.")
    save_safetensors: bool | None = moved("weights are always saved as safetensors.")
    logging_dir: str | None = moved("set the environment variable TENSORBOARD_LOGGING_DIR.")
    half_precision_backend: str | None = moved(_HALF)
    fp16_backend: str | None = moved(_HALF)
    fp16_opt_level: str | None = moved(_HALF)
    use_mps_device: bool | None = moved(_DEVICE)
    tpu_num_cores: int | None = moved(_TPU)
    tpu_metrics_debug: bool | None = moved(_TPU)
    fsdp_min_num_params: int | None = moved("set min_num_params in fsdp_config.")
    fsdp_transformer_layer_cls_to_wrap: str | None = moved("now part of fsdp_config.")
    include_tokens_per_second: bool | None = moved("num_tokens is logged, and the time at the end.")
    past_index: int | None = moved(_DROPPED)
    jit_mode_eval: bool | None = moved(_DROPPED)
    use_ipex: bool | None = moved(_DROPPED)
    use_legacy_prediction_loop: bool | None = moved(_DROPPED)
    mp_parameters: str | None = moved(_DROPPED)
    ray_scope: str | None = moved(_DROPPED)


@dataclass
class TrainingDefaults(LegacyTrainingArguments, TrainingArguments):
    """Training arguments with the library's defaults; every training config ends its bases with this class."""

    logging_steps: float = same(TrainingArguments, "logging_steps", 10)
    bf16: bool | None = option(None, "Train in bfloat16. None: if the accelerator has it, unless fp16.", flag=True)  # pyright: ignore[reportIncompatibleVariableOverride]
    save_dtype: str | None = option(None, "Dtype of saved models. None: of the files loaded.", choices=DTYPES)
    weights: Weights | None = shared("weights")
    sp_size: int = option(1, "Processes over which the tokens of each batch are spread (long sequences).", ">= 1")
    gradient_checkpointing: bool = option(True, "Recompute activations in the backward pass: less memory.")
    log_format: Literal["auto", "lines", "dict"] = option("auto", "Logs: lines (auto: not in notebooks), or dicts.")
    report: bool = option(True, "Write what `trl report` shows into output_dir: run.jsonl and completions.")
    hang_timeout: float | None = option(None, "Seconds without progress that end all processes; see stacks.txt.", "> 0")
    resume_from_checkpoint: str | None = option(None, "Checkpoint's folder, or true for the newest.")
    resume_without: list[str] | None = option(None, "Lost parts that start anew: optimizer, random_state, progress.")
    async_save: bool = option(False, "Write checkpoints beside training; for FSDP2 with SHARDED_STATE_DICT.")
    checkpoint_mirror: str | None = option(None, "URL where checkpoints are copied: s3://…, file://… (fsspec).")

    def check(self) -> None:
        super().check()
        if unknown := set(self.resume_without or ()) - RESUME_PARTS:
            raise ValueError(f"resume_without must be of {sorted(RESUME_PARTS)}, got {sorted(unknown)}.")
        if "optimizer" in (self.resume_without or ()) and self.deepspeed:
            raise ValueError("resume_without=['optimizer'] does not work with DeepSpeed. Start a new run.")
        if self.max_steps == 0 or (self.max_steps < 0 and self.num_train_epochs <= 0):
            lengths = f"{self.num_train_epochs}, {self.max_steps}"
            raise ValueError(f"num_train_epochs must be > 0 or max_steps >= 1, got {lengths}.")
        strategies = [getattr(strategy, "value", strategy) for strategy in (self.eval_strategy, self.save_strategy)]
        if self.load_best_model_at_end and strategies[1] != "best" and len(set(strategies)) > 1:
            raise ValueError(
                "load_best_model_at_end needs an evaluation for every saved model, got eval_strategy={!r}, "
                "save_strategy={!r}. Set both to 'steps' or 'epoch', or save_strategy to 'best'.".format(*strategies)
            )
        if self.load_best_model_at_end and strategies == ["steps", "steps"]:
            evaluated = self.eval_steps or self.logging_steps
            if (self.save_steps < 1) != (evaluated < 1) or round(self.save_steps * 1e6) % round(evaluated * 1e6):
                steps = f"{evaluated:g}{'' if self.eval_steps else ' (of logging_steps)'}"
                needs = "load_best_model_at_end needs save_steps to be a multiple of eval_steps"
                raise ValueError(f"{needs}, got {self.save_steps:g} and {steps}. Set save_steps to {evaluated:g}.")
        if self.eval_steps and strategies[0] == "no":
            warn_caller(f"eval_steps={self.eval_steps:g} has no effect with eval_strategy='no'. Set it to 'steps'.")
        names, name = [name.value for name in OptimizerNames], str(getattr(self.optim, "value", self.optim))
        if name not in names:
            raise ValueError(f"optim must be an optimiser of transformers, got {name!r}.{did_you_mean(name, names)}")
        if name.endswith("bit") and find_spec("bitsandbytes") is None:
            raise ImportError(f"optim={name!r} needs bitsandbytes. Run `pip install 'trl[quantization]'`.")
        if self.deepspeed and find_spec("deepspeed") is None:
            raise ImportError("deepspeed needs the deepspeed package. Run `pip install 'trl[deepspeed]'`.")

    def __post_init__(self) -> None:
        self.settle()
        if self.report_to in (None, [None]):  # transformers takes None for the name of a tracker, and wraps it
            self.report_to = "none"
        if self.bf16 is None:
            # Weights in bfloat16 need no autocast, under which FSDP makes them float32.
            self.bf16 = self.weights is None and default_bf16(use_cpu=self.use_cpu, fp16=self.fp16)
        names = CHECKPOINTING[::-1]  # the newest name that has a value wins
        enabled = next((x for x in (getattr(self, name, None) for name in names) if x is not None), False)
        kwargs = next((x for x in (getattr(self, f"{name}_kwargs", None) for name in names) if x), None)
        self.set_checkpointing(enabled, kwargs)
        TrainingArguments.__post_init__(self)
        if self.device.type == "cpu" and (self.fp16 or self.fp16_full_eval):
            # accelerate would compute in float32
            raise ValueError("fp16 needs a GPU, and this run is on a CPU. Set bf16 and use_cpu, or leave it out.")

    def set_checkpointing(self, enabled: bool, kwargs: JSONDict) -> None:
        """Switch gradient checkpointing on or off, under all names that transformers has for it."""
        if enabled:
            kwargs = {"use_reentrant": False, **(json_object("gradient_checkpointing_kwargs", kwargs) or {})}
        for name in CHECKPOINTING:
            if hasattr(self, name):
                setattr(self, name, enabled)
                setattr(self, f"{name}_kwargs", kwargs)

    @property
    def data_processes(self) -> int:
        """The number of parts into which rows are shared out: of processes, or of groups of `sp_size`."""
        return self.world_size // self.sp_size

    @property
    def data_index(self) -> int:
        """The part of the rows that this process reads, counted from 0."""
        return self.process_index // self.sp_size

    def to_dict(self) -> Settings:
        """All fields as plain values, secrets redacted, dicts and tokens of the vocabulary as they are."""
        words = {name: value for name, value in vars(self).items() if name.endswith("_token") and "hub" not in name}
        return {**super(TrainingDefaults, unwritten(self)).to_dict(), **redacted(words)}


@dataclass
class RowOptions(TrainingDefaults):
    """How the model is loaded, and how rows are prepared and cut."""

    model_init_kwargs: JSONDict = shared("model_init_kwargs")
    dataset_num_proc: int | None = shared("dataset_num_proc")
    max_length: int | None = shared("max_length")


@dataclass
class SequenceOptions(RowOptions):
    """Special tokens, padding and memory, for SFT and reward models."""

    pad_token: str | None = shared("pad_token")
    chat_template_path: str | None = option(None, "Jinja file, or tokenizer to copy the chat template from.")
    eos_token: str | None = option(None, "Token that ends a sequence. None: the tokenizer's eos token.")
    pad_to_multiple_of: int | None = option(None, "Pad batches to a multiple of this many tokens.", ">= 1")
    activation_offloading: bool = option(False, "Keep activations in CPU memory. No effect on a CPU.")


def wrong_config(args: object, config_class: type) -> TypeError:
    """The error for `args` that are no config of this trainer."""
    name = config_class.__name__
    return TypeError(f"args must be a {name}, got {type(args).__name__}. Use {name}(...).")


def require_set_up(args: object) -> None:
    """Raise TypeError for a config whose class has a `__post_init__` that leaves ours out."""
    if not hasattr(args, "distributed_state"):
        raise TypeError(f"{type(args).__name__}.__post_init__ must call super().__post_init__().")


def config_or_default(args: object, config_class: type[Config], output_dir: str) -> Config:
    """`args`, or (None) a default config. Raises: TypeError for other configs, and for ones not set up."""
    if args is None:
        return config_class(output_dir)  # pyright: ignore[reportCallIssue]
    if not isinstance(args, config_class):
        raise wrong_config(args, config_class)
    require_set_up(args)
    return args


def default_bf16(*, use_cpu: bool, fp16: bool) -> bool:
    """Whether `bf16=None` means bfloat16 here: on an accelerator that computes in it, without fp16 or fp8."""
    launched_with = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    on_cpu = use_cpu or os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")
    if fp16 or on_cpu or launched_with in ("fp16", "fp8"):
        return False
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)  # emulation on older GPUs is slow
    return bool(is_torch_bf16_gpu_available())
