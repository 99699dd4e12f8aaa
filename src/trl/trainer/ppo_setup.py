"""The parts of a step-level trainer: accelerator, reference, optimiser, tracker, model card, and the responses of a
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import GradientState
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl.collators.preference import seq2seq_batch
from trl.generation.engine import Sampling, unsupported_settings
from trl.models.peft import is_peft_model
from trl.models.reference import FrozenModel, Reference, make_reference
from trl.models.reference_weights import create_reference_model
from trl.models.scoring.head import ScoreOptions
from trl.models.switches import holding
from trl.models.value_head import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    ModelWithValueHead,
)
from trl.models.value_wrapper import PreTrainedModelWrapper
from trl.reporting.model_card import HERE, generate_model_card
from trl.reporting.trackers import get_comet_experiment_url, get_wandb_run_url
from trl.rollouts.experience import Experience
from trl.tensors.ragged import Ragged
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
    """Raise TypeError for a config, model or tokenizer that is missing or of another kind, and for `unknown`
    arguments.
    """
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
    model: ModelWithValueHead,
    ref_model: Any,
    scorer: Any,
    shared: int | None,
) -> tuple[Reference, Any]:
    """The reference, and the model that it is (None for the policy without its adapter).

    Without `ref_model` a policy with adapters is its own reference, any other is copied but for the first `shared`
    layers, which are frozen in both.

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
    reference = make_reference(model.pretrained_model, scorer, inner)
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


def model_card(config: PPOConfig, base_model: str | None, model_name: str, *, tags: list[str], steps: int) -> Any:
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


# ---- responses

# Defaults of transformers, under the model's generation config and the arguments of the call.
_DEFAULTS = {"max_length": 20, "do_sample": False, "top_k": 50}


def sampling_of(core: Any, given: Mapping[str, Any], warn: Callable[..., None]) -> Sampling:
    """The engine's settings for `given` arguments of a transformers model's `generate`, over its generation config.

    A length in the arguments replaces that of a `generation_config` among them, and this the model's.

    What the engine does not support, such as beams, is left out of the model's config, with a warning.

    Raises: ValueError for such settings in the arguments.
    """
    own = _set_fields(core.generation_config)
    unsupported = {name: own.pop(name) for name in unsupported_settings(own)}
    if core.config.is_encoder_decoder:
        unsupported.pop("forced_bos_token_id", None)  # which the engine itself reads
    if unsupported:
        warn(
            "The model's generation config has %s, which rollouts do not support and leave out.",
            ", ".join(f"{name}={value!r}" for name, value in unsupported.items()),
        )
    single = {name: value for name, value in given.items() if name != "generation_config"}
    config = given.get("generation_config")
    found: dict[str, Any] = {}
    for layer in (_DEFAULTS, own, _set_fields(config), single):
        if "max_length" in layer:
            found.pop("max_new_tokens", None)
        found |= layer
        if "max_new_tokens" in layer:
            found.pop("max_length", None)
    return Sampling().updated(found)


def _set_fields(config: Any) -> dict[str, Any]:
    """The fields of a generation config that are set."""
    given = {} if config is None else vars(config)
    return {name: value for name, value in given.items() if value is not None and not name.startswith("_")}


class ResponseScores(NamedTuple):
    """Scores of B responses, each `(B, R)`, 0 after a response's end; `entropies` and `logits (B, R, V)` on request."""

    logps: Tensor
    values: Tensor | None
    entropies: Tensor | None
    logits: Tensor | None


def responses_as_rows(queries: Sequence[Tensor], responses: Sequence[Tensor]) -> Experience:
    """Queries and responses as an `Experience`, on the responses' device."""
    device = responses[0].device
    prompts, completions = (Ragged.of([row.to(device) for row in part]) for part in (queries, responses))
    return Experience(prompts.to(device), completions.to(device))


def score_responses(
    scorer: Any, model: nn.Module, rows: Experience, *, logits: bool = False, entropies: bool = False
) -> ResponseScores:
    """Scores of one forward pass, with gradient unless it is off; equal queries are neighbours, so that they can be
    shared.
    """
    prompts = [prompt.tolist() for prompt in rows.prompts.split()]
    order = torch.tensor(sorted(range(len(rows)), key=prompts.__getitem__))
    rows = rows.take(order.to(rows.prompts.values.device))
    is_encoder_decoder = scorer.core.config.is_encoder_decoder
    if is_encoder_decoder:
        pairs = zip(rows.prompts.split(), rows.completions.split(), strict=True)
        columns = [{"prompt_input_ids": prompt, "completion_input_ids": completion} for prompt, completion in pairs]
        batch = seq2seq_batch(columns, pad_token_id=scorer.pad_token_id, completions=("completion_input_ids",))
    else:
        batch = rows.as_batch(prefix_sharing=scorer.shares_prefixes)
        del batch["rows"]
    batch = {name: value.to(rows.completions.values.device) for name, value in batch.items()}
    options = ScoreOptions(entropy="scored" if entropies else "none")
    lengths, places, chosen = rows.completions.lengths.tolist(), order.argsort().tolist(), None
    if logits:
        scored, whole = scorer.score_with_logits(model, batch, options)
        begins = [0 if is_encoder_decoder else length - 1 for length in rows.prompts.lengths.tolist()]
        parts = zip(whole, begins, lengths, strict=True)
        chosen = torch.cat([row[begin : begin + length] for row, begin, length in parts])
    else:
        scored = scorer.score(model, batch, options)

    def padded(flat: Tensor | None) -> Any:
        if flat is None:
            return None
        found = flat.split(lengths)
        return pad_sequence([found[place] for place in places], batch_first=True)

    return ResponseScores(*map(padded, (scored.logps, scored.values, scored.entropies, chosen)))


def join_rows(parts: Sequence[Tensor | None]) -> Any:
    """Concatenate tensors `(b, r, ...)` to `(B, R, ...)`, padded with 0; None stays None.

    >>> join_rows([torch.ones(1, 1), torch.ones(1, 2)])
    tensor([[1., 0.],
            [1., 1.]])
    """
    rows = [row for part in parts if part is not None for row in part]
    return pad_sequence(rows, batch_first=True) if rows else None


def shuffled_minibatches(rows: int, mini_batch_size: int, accumulation: int) -> Iterator[list[list[int]]]:
    """The minibatches of each optimiser step of one epoch, in an order from numpy's global generator."""
    order = np.random.permutation(rows).tolist()
    size = mini_batch_size * accumulation
    for begin in range(0, rows, size):
        step = order[begin : begin + size]
        yield [step[first : first + mini_batch_size] for first in range(0, len(step), mini_batch_size)]
