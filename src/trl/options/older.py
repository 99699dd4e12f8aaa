"""Settings of earlier levels and of transformers 4, moved to where they are now: each field says its successor."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from trl.options.checks import warn_caller
from trl.options.groups import OptionGroup


class _Help(str):
    """A field's help text that also holds the successor: argparse is handed all of a field's metadata."""

    moved_to: str | None
    reason: str


def _older(reason: str = "", *, to: str | None = None) -> Any:
    """A field that moves `to` another, or (None) that has no successor for this reason."""
    text = _Help(f"Deprecated: {reason or f'now {to}.'}")
    text.moved_to, text.reason = to, reason.rstrip(".")
    return field(default=None, metadata={"help": text})


_HALF = "mixed precision is PyTorch's autocast."
_TPU = "accelerate launch sets TPUs up."
_DEVICE = "the accelerator of the machine is used where there is one."
_DROPPED = "transformers 5 cannot do this any more."

# What a value becomes in the new field, given the config; None leaves the field as it is. By default the value itself.
_VALUES: dict[str, Callable[[Any, Any], Any]] = {
    "group_by_length": lambda config, value: "group_by_length" if value else "random",
    "adafactor": lambda config, value: "adafactor" if value else None,
    "include_inputs_for_metrics": lambda config, value: (
        [*config.include_for_metrics, "inputs"] if value else None
    ),
    "push_to_hub_organization": lambda config, value: (
        f"{value}/{Path(config.hub_model_id or config.output_dir).name}"
    ),
}


def _move(config: Any, group: type, preface: str) -> None:
    """Move what is set of the fields of `group`, and warn once of all of them."""
    places = []
    for entry in fields(config):
        if entry.name not in group.__annotations__ or (value := getattr(config, entry.name)) is None:
            continue
        text, value_of = entry.metadata["help"], _VALUES.get(entry.name, lambda _, given: given)
        setattr(config, entry.name, None)
        if text.moved_to is not None and (moved := value_of(config, value)) is not None:
            setattr(config, text.moved_to, moved)
        places.append(f"{entry.name} -> {text.moved_to or f'nothing, {text.reason}'}")
    if places:
        warn_caller(f"{preface}: {'; '.join(places)}.", FutureWarning)


@dataclass
class OlderTrainingArguments(OptionGroup):
    """Names that documents of the 0.x levels use and transformers 5 no longer has."""

    warmup_ratio: float | None = _older(
        "the share of all steps that warm up; warmup_steps takes it, below 1.", to="warmup_steps"
    )
    evaluation_strategy: str | None = _older(to="eval_strategy")
    no_cuda: bool | None = _older(to="use_cpu")
    group_by_length: bool | None = _older(to="train_sampling_strategy")
    adafactor: bool | None = _older("now optim='adafactor'.", to="optim")
    include_inputs_for_metrics: bool | None = _older(to="include_for_metrics")
    push_to_hub_model_id: str | None = _older(to="hub_model_id")
    push_to_hub_organization: str | None = _older("now part of hub_model_id.", to="hub_model_id")
    push_to_hub_token: str | None = _older(to="hub_token")
    torchdynamo: str | None = _older(to="torch_compile_backend")
    per_gpu_train_batch_size: int | None = _older(to="per_device_train_batch_size")
    per_gpu_eval_batch_size: int | None = _older(to="per_device_eval_batch_size")
    overwrite_output_dir: bool | None = _older("an output directory is always written into.")
    save_safetensors: bool | None = _older("weights are always saved as safetensors.")
    logging_dir: str | None = _older("set the environment variable TENSORBOARD_LOGGING_DIR.")
    half_precision_backend: str | None = _older(_HALF)
    fp16_backend: str | None = _older(_HALF)
    fp16_opt_level: str | None = _older(_HALF)
    use_mps_device: bool | None = _older(_DEVICE)
    tpu_num_cores: int | None = _older(_TPU)
    tpu_metrics_debug: bool | None = _older(_TPU)
    fsdp_min_num_params: int | None = _older("set min_num_params in fsdp_config.")
    fsdp_transformer_layer_cls_to_wrap: str | None = _older(
        "set transformer_layer_cls_to_wrap in fsdp_config."
    )
    include_tokens_per_second: bool | None = _older("num_tokens is logged, and the time at the end.")
    past_index: int | None = _older(_DROPPED)
    jit_mode_eval: bool | None = _older(_DROPPED)
    use_ipex: bool | None = _older(_DROPPED)
    use_legacy_prediction_loop: bool | None = _older(_DROPPED)
    mp_parameters: str | None = _older(_DROPPED)
    ray_scope: str | None = _older(_DROPPED)

    def check(self) -> None:
        if self.warmup_ratio is not None and not 0 <= self.warmup_ratio < 1:
            raise ValueError(
                f"warmup_ratio must be in [0, 1), got {self.warmup_ratio}. Use warmup_steps for a number of steps."
            )
        _move(self, OlderTrainingArguments, "transformers 5 no longer has these training arguments")
        super().check()


@dataclass
class OlderRLOO(OptionGroup):
    """Names that programs of 0.21 and before give RLOO's settings."""

    rloo_k: int | None = _older(to="num_generations")
    cliprange: float | None = _older(to="epsilon")
    kl_coef: float | None = _older(to="beta")
    exp_name: str | None = _older(to="run_name")
    normalize_reward: bool | None = _older(
        "now normalize_advantages; it never normalised rewards.", to="normalize_advantages"
    )
    num_ppo_epochs: int | None = _older(to="num_iterations")
    num_mini_batches: int | None = _older(to="steps_per_generation")
    response_length: int | None = _older(to="max_completion_length")

    def check(self) -> None:
        _move(self, OlderRLOO, "these settings of RLOO have other names since 0.22")
        super().check()
