"""The parts of a step-level trainer, checked and put together: accelerator, reference, optimiser, tracker, model card."""

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

from trl.models.peft import is_peft_model
from trl.models.reference import FrozenModel, Reference, make_reference
from trl.models.reference_weights import create_reference_model
from trl.models.value_head import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    ModelWithValueHead,
)
from trl.models.value_wrapper import PreTrainedModelWrapper
from trl.reporting.model_card import HERE, generate_model_card
from trl.reporting.trackers import get_comet_experiment_url, get_wandb_run_url
from trl.trainer.ppo_config import PPOConfig

_CITATION = """@article{ziegler2019finetuning,
    title   = {Fine-Tuning Language Models from Human Preferences},
    author  = {Ziegler, Daniel M. and Stiennon, Nisan and Wu, Jeffrey and Brown, Tom B. and Radford, Alec and Amodei, Dario and
               Christiano, Paul and Irving, Geoffrey},
    journal = {arXiv preprint arXiv:1909.08593},
    year    = {2019}
}"""
_FACTS = (
    "learning_rate",
    "batch_size",
    "mini_batch_size",
    "ppo_epochs",
    "init_kl_coef",
    "kl_penalty",
    "seed",
)


def check_parts(config: Any, model: Any, tokenizer: Any, unknown: Mapping[str, Any]) -> None:
    """Raise TypeError for a config, model or tokenizer that is missing or of another kind, and for `unknown` arguments."""
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


def make_accelerator(config: PPOConfig) -> Accelerator:
    """An accelerator for a config, to be used for updates inside of `accumulating`."""
    shared = GradientState()
    before = shared.plugin_kwargs
    options = config.options("accelerator_kwargs")
    if not torch.accelerator.is_available() and options.get("cpu", True):
        # Without this, accelerate (1.15) does not connect processes that torchrun starts on a CPU; Accelerator(cpu=True)
        # would turn DeepSpeed off.
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
    """Let an accelerator accumulate as a config says, by counting minibatches.

    accelerate keeps the number of minibatches once per process: whoever set it last would decide for every trainer.
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
    settings = config.to_dict()
    if config.log_with == "tensorboard":  # takes numbers and text
        plain = (bool, int, float, str)
        settings = {name: each if isinstance(each, plain) else str(each) for name, each in settings.items()}
    else:
        settings = {"trl_ppo_trainer_config": settings}
    accelerator.init_trackers(
        config.tracker_project_name, config=settings, init_kwargs=config.options("tracker_kwargs")
    )


def set_up_reference(
    model: ModelWithValueHead,
    ref_model: Any,
    scorer: Any,
    shared: int | None,
) -> tuple[Reference, Any]:
    """The reference, and the model that it is (None for the policy without its adapter).

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
    reference = make_reference(model.pretrained_model, scorer, inner, force_use_ref_model=inner is not None)
    assert inner is None or isinstance(reference, FrozenModel)
    return reference, ref_model


def check_optimiser(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, scheduler: Any, learning_rate: float
) -> torch.optim.Optimizer:
    """The given optimiser, or Adam over the parameters that train.

    Raises: ValueError for an optimiser without a parameter of the model, and for a schedule of another optimiser.
    """
    groups: Any = getattr(optimizer, "param_groups", None)  # DeepSpeed's stand-in has none
    if groups is not None:
        held = {id(parameter) for group in groups for parameter in group["params"]}
        if held.isdisjoint(id(parameter) for parameter in model.parameters()):
            raise ValueError(
                "optimizer has no parameter of model, expected those that train. Make it from this model's parameters, after "
                "peft_config was applied."
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
            "model must have parameters that train, got none. Load its adapter with is_trainable=True, or give peft_config."
        )
    fused = all(each.is_floating_point() and each.device.type in ("cpu", "cuda") for each in trained)
    return torch.optim.Adam(trained, lr=learning_rate, fused=fused)


def model_card(
    config: PPOConfig, base_model: str | None, model_name: str, *, tags: list[str], steps: int
) -> Any:
    """The model card of a policy after so many steps."""
    return generate_model_card(
        base_model=base_model,
        model_name=model_name,
        hub_model_id=HERE,
        dataset_name=None,
        tags=tags,
        wandb_url=get_wandb_run_url(),
        comet_url=get_comet_experiment_url(),
        trainer_name="PPO",
        trainer_citation=_CITATION,
        paper_title="Fine-Tuning Language Models from Human Preferences",
        paper_id="1909.08593",
        training_facts={name: getattr(config, name) for name in _FACTS} | {"steps": steps},
    )
