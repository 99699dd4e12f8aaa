"""The parts of a step-level trainer, checked and put together: accelerator, policy, reference, optimiser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import GradientState
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl.data.step_inputs import TokenLimits
from trl.generation.transformers.engine import context_length_of
from trl.models.parts import embedded_tokens
from trl.models.peft import is_peft_model
from trl.models.policy import make_scorer, report_fallbacks
from trl.models.reference import FrozenModel, Reference, make_reference
from trl.models.reference_weights import create_reference_model
from trl.models.value_head import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    ModelWithValueHead,
)
from trl.models.value_wrapper import PreTrainedModelWrapper
from trl.trainer.ppo_config import PPOConfig

_OF_DATA_SETS = {
    "args",
    "callbacks",
    "eval_dataset",
    "optimizers",
    "peft_config",
    "processing_class",
    "reward_model",
    "value_model",
}


def check_parts(config: Any, model: Any, tokenizer: Any, unknown: Mapping[str, Any]) -> None:
    """Raise TypeError for a config, model or tokenizer that is missing or of another kind, and for `unknown` arguments."""
    if elsewhere := sorted(unknown.keys() & _OF_DATA_SETS):
        raise TypeError(
            f"PPOTrainer got {', '.join(elsewhere)}, which the trainer over data sets takes; this one belongs to PPO step by step. "
            "Use PPOConfig and PPOTrainer of trl.experimental.ppo."
        )
    if unknown:
        raise TypeError(
            f"PPOTrainer got unexpected arguments: {', '.join(sorted(unknown))}. Correct or remove them."
        )
    if not isinstance(config, PPOConfig):
        raise TypeError(
            f"config must be a trl.PPOConfig, got {type(config).__name__}. The trainer over data sets, which takes `args`, is "
            "trl.experimental.ppo.PPOTrainer."
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


def check_optimiser(model: nn.Module, optimizer: torch.optim.Optimizer | None, lr_scheduler: Any) -> None:
    """Raise ValueError for an optimiser without a parameter of the model, and for a schedule of another optimiser."""
    groups: Any = getattr(optimizer, "param_groups", None)  # DeepSpeed's stand-in has none
    if groups is not None:
        held = {id(parameter) for group in groups for parameter in group["params"]}
        if held.isdisjoint(id(parameter) for parameter in model.parameters()):
            raise ValueError(
                "optimizer has no parameter of model, expected those that train. Make it from this model's parameters, after "
                "peft_config was applied."
            )
    scheduled = getattr(lr_scheduler, "optimizer", None)
    if scheduled is not None and scheduled is not optimizer:
        given = "no optimizer" if optimizer is None else "another optimizer"
        raise ValueError(
            f"lr_scheduler belongs to an optimizer of its own, and {given} was given, expected the same one: its learning "
            "rates would not be used. Pass its optimizer too."
        )


def make_accelerator(config: PPOConfig) -> Accelerator:
    """An accelerator for a config, to be used for updates inside of `accumulating`."""
    shared = GradientState()
    before = shared.plugin_kwargs
    options = config.options("accelerator_kwargs")
    if not torch.accelerator.is_available() and options.get("cpu", True):
        # Without saying so, accelerate (1.15) leaves processes that torchrun starts on a CPU apart from one another; saying
        # it to the Accelerator would turn DeepSpeed off.
        PartialState(cpu=True)
    accelerator = Accelerator(
        log_with=config.log_with,
        gradient_accumulation_plugin=_counting(config),
        project_config=ProjectConfiguration(**config.options("project_kwargs")),
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


@contextmanager
def accumulating(accelerator: Accelerator, config: PPOConfig) -> Iterator[None]:
    """Let an accelerator accumulate as a config says, by counting minibatches, whatever data loader a loop has.

    accelerate keeps the number of minibatches once per process: whoever set it last would decide for every trainer there is.
    """
    state = accelerator.gradient_state
    before, state.plugin_kwargs = state.plugin_kwargs, _counting(config).to_kwargs()
    try:
        yield
    finally:
        state.plugin_kwargs = before


def _counting(config: PPOConfig) -> GradientAccumulationPlugin:
    return GradientAccumulationPlugin(
        num_steps=config.gradient_accumulation_steps, sync_with_dataloader=False
    )


def start_trackers(accelerator: Accelerator, config: PPOConfig) -> None:
    """Tell the tracker of `log_with`, if any, about the run."""
    if config.log_with is None:
        return
    settings: dict[str, Any] = config.to_dict()
    if config.log_with != "tensorboard":
        settings = {"trl_ppo_trainer_config": settings}
    else:
        plain = (bool, int, float, str)
        settings = {
            name: value if isinstance(value, plain) else str(value) for name, value in settings.items()
        }
    accelerator.init_trackers(
        config.tracker_project_name, config=settings, init_kwargs=config.options("tracker_kwargs")
    )


def policy_scorer(model: ModelWithValueHead, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The scoring forward of the policy; what the model cannot take is said in the log."""
    scorer = make_scorer(model, tokenizer)
    report_fallbacks(model.get_base_model(), scorer)
    return scorer


def set_up_reference(
    model: ModelWithValueHead,
    ref_model: Any,
    tokenizer: PreTrainedTokenizerBase,
    scorer: Any,
    shared: int | None,
) -> tuple[Reference, Any]:
    """The reference, and the model that it is (None where it is the policy without its adapter).

    Without `ref_model` a policy with adapters is its own reference, any other is copied but for the first `shared` layers,
    which are frozen in both.

    Raises: TypeError for a `ref_model` that is no model; ValueError for one that does not fit.
    """
    known = (PreTrainedModelWrapper, PreTrainedModel)
    if not (ref_model is None or isinstance(ref_model, known) or is_peft_model(ref_model)):
        raise TypeError(
            f"ref_model must be a model with a value head or a transformers model, got {type(ref_model).__name__}. Leave it "
            "out to use the model as it is now."
        )
    if ref_model is None and not model.is_peft_model:
        ref_model = create_reference_model(model, num_shared_layers=shared)
    inner = getattr(ref_model, "pretrained_model", ref_model)
    reference = make_reference(
        model.pretrained_model,
        scorer=scorer,
        make_scorer=lambda other: make_scorer(other, tokenizer),
        ref_model=inner,
        force_use_ref_model=inner is not None,
    )
    assert inner is None or isinstance(reference, FrozenModel)
    return reference, ref_model


def make_adam(model: nn.Module, learning_rate: float) -> torch.optim.Adam:
    """Adam over the parameters that train, fused where torch has it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError(
            "model must have parameters that train, got none. Load its adapter with is_trainable=True, or give peft_config."
        )
    fused = all(
        parameter.is_floating_point() and parameter.device.type in ("cpu", "cuda") for parameter in trained
    )
    return torch.optim.Adam(trained, lr=learning_rate, fused=fused)


def token_limits(model: ModelWithValueHead) -> TokenLimits:
    """What the policy can read."""
    core: Any = model.get_base_model()
    start = core.config.decoder_start_token_id if core.config.is_encoder_decoder else None
    return TokenLimits(embedded_tokens(core), context_length_of(model.pretrained_model), start)


def enable_checkpointing(model: ModelWithValueHead) -> None:
    """Recompute activations in the backward pass, also through frozen embeddings."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if model.is_peft_model:
        model.enable_input_require_grads()
