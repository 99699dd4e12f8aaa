"""Settings of earlier levels and of transformers 4, moved to where they are now: each field says its successor."""

from dataclasses import dataclass
from pathlib import Path

from trl.options.groups import OptionGroup, moved

_HALF = "mixed precision is PyTorch's autocast."
_TPU = "accelerate launch sets TPUs up."
_DEVICE = "the accelerator of the machine is used where there is one."
_DROPPED = "transformers 5 cannot do this any more."


@dataclass
class LegacyTrainingArguments(OptionGroup):
    """Names that documents of the 0.x levels use and transformers 5 no longer has."""

    warmup_ratio: float | None = moved(
        "now warmup_steps, which takes a share of all steps too.", "[0, 1)", to="warmup_steps"
    )
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
    fsdp_transformer_layer_cls_to_wrap: str | None = moved(
        "set transformer_layer_cls_to_wrap in fsdp_config."
    )
    include_tokens_per_second: bool | None = moved("num_tokens is logged, and the time at the end.")
    past_index: int | None = moved(_DROPPED)
    jit_mode_eval: bool | None = moved(_DROPPED)
    use_ipex: bool | None = moved(_DROPPED)
    use_legacy_prediction_loop: bool | None = moved(_DROPPED)
    mp_parameters: str | None = moved(_DROPPED)
    ray_scope: str | None = moved(_DROPPED)
