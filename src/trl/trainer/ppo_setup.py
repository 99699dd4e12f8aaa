"""The parts of a step-level trainer: accelerator, reference, optimiser, tracker, model card."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import GradientState
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl.data.step_inputs import TokenLimits
from trl.generation.transformers.engine import context_length_of
from trl.models.parts import embedded_tokens
from trl.models.peft import is_peft_model
from trl.models.policy import make_scorer, report_fallbacks, warn_of_rounding
from trl.models.reference import FrozenModel, Reference, make_reference
from trl.models.reference_weights import create_reference_model
from trl.models.residuals import check_residuals, keep_residuals, to_bfloat16
from trl.models.switches import enable_gradient_checkpointing, holding
from trl.models.value_head import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    ModelWithValueHead,
)
from trl.models.value_wrapper import PreTrainedModelWrapper
from trl.reporting.trackers import start_trackers
from trl.trainer.ppo_config import PPOConfig


def check_parts(config: object, model: object, tokenizer: object, unknown: Mapping[str, object]) -> None:
    """Raise TypeError for a config, model or tokenizer of another kind, and for `unknown` arguments."""
    if unknown or not isinstance(config, PPOConfig):
        given = f"arguments {sorted(unknown)}" if unknown else type(config).__name__
        raise TypeError(
            f"config must be a trl.PPOConfig, got {given}. To train on a data set with `args` and a reward model, use "
            "PPOConfig and PPOTrainer of trl.experimental.ppo."
        )
    if not isinstance(model, (AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead)):
        raise TypeError(
            f"model must be an AutoModelForCausalLMWithValueHead or AutoModelForSeq2SeqLMWithValueHead, got "
            f"{type(model).__name__}. Load it with one's from_pretrained, which also takes a model."
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(
            f"tokenizer must be a transformers tokenizer, got {type(tokenizer).__name__}. Load it with AutoTokenizer."
        )


class StepParts(NamedTuple):
    """What a step-level trainer is made of, prepared by accelerate."""

    accelerator: Accelerator
    model: Any  # as accelerate prepares it
    optimizer: Any
    lr_scheduler: Any
    scorer: Any
    reference: Reference
    ref_model: nn.Module | None
    limits: TokenLimits


def step_parts(
    config: PPOConfig, model: ModelWithValueHead, tokenizer: PreTrainedTokenizerBase, *, ref_model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None, lr_scheduler: LRScheduler | None, num_shared_layers: int | None,
) -> StepParts:  # fmt: skip
    """The parts of a trainer. Raises: TypeError, ValueError for what does not fit together."""
    accelerator = make_accelerator(config)
    config.is_encoder_decoder, config.is_peft_model = bool(model.config.is_encoder_decoder), bool(model.is_peft_model)
    if config.gradient_checkpointing:
        enable_gradient_checkpointing(model, None)  # type: ignore[arg-type]
        if model.is_peft_model:
            model.enable_input_require_grads()
    if config.weights is not None:
        check_residuals(accelerator)
        to_bfloat16(model.pretrained_model)  # the value head stays in float32
    else:
        warn_of_rounding(model.pretrained_model, config.learning_rate)
    core = model.get_base_model()
    scorer = make_scorer(model, tokenizer)
    report_fallbacks(core, scorer)
    reference, ref_model = set_up_reference(model, ref_model, scorer, num_shared_layers)
    optimizer = check_optimiser(model, optimizer, lr_scheduler, config.learning_rate)
    if config.weights is not None:
        keep_residuals(optimizer)
    start = core.config.decoder_start_token_id if config.is_encoder_decoder else None
    limits = TokenLimits(embedded_tokens(core), context_length_of(model.pretrained_model), start)
    start_trackers(accelerator, config)
    with accumulating(accelerator, config):
        prepared = accelerator.prepare(model, optimizer, *([] if lr_scheduler is None else [lr_scheduler]))
    reference.prepare(accelerator)
    policy, optimizer, schedule = (*prepared, None)[:3]
    return StepParts(accelerator, policy, optimizer, schedule, scorer, reference, ref_model, limits)


def make_accelerator(config: Any) -> Accelerator:
    """An accelerator for a config, to be used for updates inside of `accumulating`."""
    shared = GradientState()
    before = shared.plugin_kwargs
    options = config.accelerator_kwargs
    if not torch.accelerator.is_available() and options.get("cpu", True):
        # Without this, accelerate (1.15) does not connect processes that torchrun starts on a CPU;
        # Accelerator(cpu=True) would turn DeepSpeed off.
        PartialState(cpu=True)
    accelerator = Accelerator(
        log_with=config.log_with,
        gradient_accumulation_plugin=_counting(config),
        project_config=ProjectConfiguration(**config.project_kwargs),
        **options,
    )
    shared.plugin_kwargs = before
    deepspeed = accelerator.state.deepspeed_plugin
    if deepspeed is not None:  # there is no loader from which accelerate could read it
        deepspeed.deepspeed_config["train_micro_batch_size_per_gpu"] = config.mini_batch_size
    config.world_size = accelerator.num_processes
    config.global_batch_size = config.batch_size * accelerator.num_processes
    config.global_backward_batch_size = (config.backward_batch_size or 1) * accelerator.num_processes
    return accelerator


def accumulating(accelerator: Accelerator, config: PPOConfig) -> AbstractContextManager[None]:
    """Let an accelerator accumulate as a config says, by counting minibatches.

    accelerate keeps the number of minibatches once per process: whoever set it last would decide for every trainer.
    """
    return holding(accelerator.gradient_state, "plugin_kwargs", _counting(config).to_kwargs())


def _counting(config: PPOConfig) -> GradientAccumulationPlugin:
    return GradientAccumulationPlugin(num_steps=config.gradient_accumulation_steps, sync_with_dataloader=False)


def set_up_reference(
    model: ModelWithValueHead, ref_model: nn.Module | None, scorer: Any, shared: int | None
) -> tuple[Reference, nn.Module | None]:
    """The reference, and the model that it is (None for the policy without its adapter).

    Without `ref_model` a policy with adapters is its own reference, any other is copied but for the first `shared`
    layers, which are frozen in both.

    Raises: TypeError for a `ref_model` that is no model; ValueError for one that does not fit.
    """
    known = (PreTrainedModelWrapper, PreTrainedModel)
    if not (ref_model is None or isinstance(ref_model, known) or is_peft_model(ref_model)):
        raise TypeError(
            f"ref_model must be a model with a value head or a transformers model, got {type(ref_model).__name__}. "
            "Leave it out to use the model as it is now."
        )
    if ref_model is None and not model.is_peft_model:
        ref_model = create_reference_model(model, num_shared_layers=shared)
    inner = getattr(ref_model, "pretrained_model", ref_model)
    reference = make_reference(model.pretrained_model, scorer, inner)
    assert inner is None or isinstance(reference, FrozenModel)
    return reference, ref_model


def check_optimiser(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, scheduler: LRScheduler | None, learning_rate: float
) -> torch.optim.Optimizer:
    """The given optimiser, or Adam over the parameters that train.

    Raises: ValueError for an optimiser without a parameter of the model, and for a schedule of another optimiser.
    """
    groups = getattr(optimizer, "param_groups", None)  # DeepSpeed's stand-in has none
    if groups is not None:
        held = {id(parameter) for group in groups for parameter in group["params"]}
        if held.isdisjoint(id(parameter) for parameter in model.parameters()):
            raise ValueError(
                "optimizer has no parameter of model, expected those that train. Make it from this model's parameters, "
                "after peft_config was applied."
            )
    scheduled = getattr(scheduler, "optimizer", None)
    if scheduled is not None and scheduled is not optimizer:
        given = "no optimizer" if optimizer is None else "another optimizer"
        raise ValueError(
            f"lr_scheduler belongs to an optimizer of its own, and {given} was given, expected the same one. Pass its "
            "optimizer too."
        )
    if optimizer is not None:
        return optimizer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError(
            "model must have parameters that train, got none. Load its adapter with is_trainable=True, or give "
            "peft_config."
        )
    fused = all(weight.is_floating_point() and weight.device.type in ("cpu", "cuda") for weight in trained)
    return torch.optim.Adam(trained, lr=learning_rate, fused=fused)
