"""The parts of a trainer of diffusion models: policy, accelerator, optimiser, precision of the modules."""

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, ProjectConfiguration
from torch import Tensor, nn

from trl.models.diffusion.flow import FlowPipeline, FlowPolicy
from trl.models.diffusion.policy import DiffusionPolicy
from trl.models.diffusion.stable_diffusion import (
    DDIMPolicy,
    DDPOStableDiffusionPipeline,
    DefaultDDPOStableDiffusionPipeline,
)

logger = logging.getLogger(__name__)

_MEMBERS = (
    "unet", "vae", "tokenizer", "text_encoder", "scheduler", "autocast", "set_progress_bar_config", "save_pretrained",
    "get_trainable_layers", "save_checkpoint", "load_checkpoint",
)  # fmt: skip
_KNOWN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def make_policy(model: Any, config: Any) -> DiffusionPolicy:
    """The policy of a pipeline; one of diffusers gets an adapter. Raises TypeError for another kind of model."""
    if not isinstance(model, (FlowPipeline, DDPOStableDiffusionPipeline)):
        wrappers = (FlowPipeline, DefaultDDPOStableDiffusionPipeline)
        fitting = [kind for kind in wrappers if hasattr(model, kind.part)]
        if not fitting:
            raise TypeError(
                "the model must be a FlowPipeline, a DDPOStableDiffusionPipeline or a pipeline of diffusers, got a "
                f"{type(model).__name__}."
            )
        model = fitting[0](model)
    elif isinstance(model, DDPOStableDiffusionPipeline):
        with_grad = hasattr(config, "truncated_backprop_rand")  # AlignProp's
        needed = [*_MEMBERS, *(["rgb_with_grad"] if with_grad else ["__call__", "scheduler_step"])]
        if missing := [name for name in needed if not hasattr(model, name)]:
            raise TypeError(
                f"{type(model).__name__} must define what DDPOStableDiffusionPipeline does, and lacks "
                f"{', '.join(missing)}."
            )
    settings = {
        "num_steps": config.sample_num_steps, "guidance_scale": config.sample_guidance_scale,
        "negative_prompt": config.negative_prompts, "trains_guidance": getattr(config, "train_cfg", True),
    }  # fmt: skip
    if isinstance(model, FlowPipeline):
        return FlowPolicy(model, noise=config.noise_level, resolution=config.resolution, **settings)
    return DDIMPolicy(model, noise=config.sample_eta, **settings)


def make_accelerator(config: Any) -> Accelerator:
    """The accelerator of a config, in float32 where float16 is not to be had.

    Raises: ValueError for FSDP and DeepSpeed, and for gradient accumulation of accelerate's.
    """
    options = dict(config.accelerator_kwargs)
    precision = options.pop("mixed_precision", config.mixed_precision)
    precision = precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    has_gpu = torch.accelerator.is_available() and not options.get("cpu")
    if precision == "fp16" and not has_gpu:
        precision = "no"
        logger.warning("mixed_precision='fp16' needs a GPU: this run computes in float32. Set 'no' or 'bf16'.")
    if not has_gpu and options.get("cpu", True):
        PartialState(cpu=True)  # connects the processes that torchrun starts on a CPU
    given = config.project_kwargs
    project = {"logging_dir": given.get("project_dir") or config.logdir, **given}
    for name in ("automatic_checkpoint_naming", "total_limit"):  # checkpoints are named and removed here
        project.pop(name, None)
    AcceleratorState._reset_state()  # a process may train several models; TrainingArguments does the same
    accelerator = Accelerator(
        log_with=config.log_with, mixed_precision=precision, project_config=ProjectConfiguration(**project), **options
    )
    kind, count = accelerator.distributed_type, accelerator.gradient_accumulation_steps
    if kind not in _KNOWN or count != 1:
        raise ValueError(
            "diffusion models train on one device or by data parallelism, without gradient accumulation of "
            f"accelerate's, got {kind.value} and {count} steps. Launch without FSDP and DeepSpeed, and set "
            "train_gradient_accumulation_steps."
        )
    return accelerator


def place_modules(modules: Sequence[nn.Module], accelerator: Accelerator) -> None:
    """Bring modules to the device: weights in float32 or wider, in mixed precision those not trained in half."""
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(accelerator.mixed_precision)
    for module in modules:
        module.eval()
        # As transformers loads a model in float16: T5 overflows otherwise.
        keeps = (getattr(module, "_keep_in_fp32_modules", None) or ()) if half == torch.float16 else ()
        whole = half is None or all(parameter.requires_grad for parameter in module.parameters())
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            if value.is_floating_point():
                wide = whole or value.requires_grad or set(keeps) & set(name.split("."))
                value.data = value.data.to(torch.promote_types(value.dtype, torch.float32) if wide else half)
        module.to(accelerator.device)


def make_optimizer(parameters: Sequence[Tensor], config: Any) -> torch.optim.Optimizer:
    """AdamW, in 8 bits where the config says so."""
    kind = torch.optim.AdamW
    if config.train_use_8bit_adam:
        import bitsandbytes

        kind = bitsandbytes.optim.AdamW8bit
    return kind(
        parameters, lr=config.train_learning_rate, betas=(config.train_adam_beta1, config.train_adam_beta2),
        eps=config.train_adam_epsilon, weight_decay=config.train_adam_weight_decay,
    )  # fmt: skip
