"""The parts of a PPO trainer, put together and checked before the first step."""

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from trl.experimental.ppo.ppo_config import PPOConfig
from trl.generation.transformers.engine import context_length_of
from trl.models.distributed import is_sharded
from trl.models.parts import causal_core, check_decoder_only, embedded_tokens, share_parameters
from trl.models.peft import is_peft_model
from trl.models.policy import Policy, report_fallbacks, set_up_policy, warn_of_rounding
from trl.models.reference import Reference
from trl.models.residuals import to_bfloat16
from trl.models.scoring.classifier import ClassificationScorer, head_of
from trl.models.scoring.values import PolicyAndValue, PolicyValueScorer
from trl.models.setup import REWARD_MODEL, load_classifier, pad_token_id, take_pad_token
from trl.models.switches import disable_dropout_in_model
from trl.rewards.source import RewardFunc
from trl.rollouts.schedule import RolloutSizes, batch_sizes

VALUE_MODEL = REWARD_MODEL._replace(words="a value model")


class Parts(NamedTuple):
    """The prepared policy, policy and value model as one module, and the scorer of both."""

    policy: Policy
    model: PolicyAndValue
    scorer: PolicyValueScorer


def value_and_policy(model: Any, value_model: Any, args: PPOConfig, processing_class: Any, peft_config: Any) -> Parts:
    """Both models ready to be trained. Without a value model one is made of the policy, with a head that gives 0.

    Raises: ValueError for a value model with more than one label, that lacks tokens of the tokenizer, or that shares
    weights with the policy; TypeError for an encoder-decoder.
    """
    policy = set_up_policy(model, args, processing_class, peft_config)
    check_decoder_only(causal_core(policy.model))
    if value_model is None:
        value_model = value_model_of(policy.model)
    value_model = load_classifier(value_model, None, VALUE_MODEL, seed=args.seed, trained=True)
    rows, needed = embedded_tokens(value_model), min(embedded_tokens(policy.model), len(policy.tokenizer))
    if rows < needed:
        raise ValueError(
            f"value_model knows {rows} tokens, the policy's tokenizer {needed}. Pass one of the policy's family, or "
            "leave it out."
        )
    if share_parameters(policy.model, value_model):
        raise ValueError(
            "value_model shares weights with the policy, expected a model of its own. Load it a second time, or leave "
            "it out."
        )
    take_pad_token(value_model, policy.tokenizer, VALUE_MODEL)
    if args.disable_dropout:
        disable_dropout_in_model(value_model)
    scorer = ClassificationScorer(value_model, pad_token_id=pad_token_id(policy.tokenizer))
    report_fallbacks(value_model, scorer)
    if args.weights is not None:
        to_bfloat16(value_model)
    else:
        warn_of_rounding(value_model, args.learning_rate)
    both = PolicyAndValue(policy.model, value_model)
    return Parts(policy, both, PolicyValueScorer(both, policy.scorer, scorer))


def value_model_of(policy: nn.Module) -> nn.Module:
    """A sequence classifier with one label on a copy of the policy's own decoder; its head gives 0 everywhere.

    Raises: ValueError where the policy's weights are sharded, or its architecture has no such classifier; RuntimeError
    where they are not those of a plain decoder (quantized, or replaced by an adapter).
    """
    core = causal_core(policy)
    if is_sharded(policy):
        raise ValueError(
            "value_model=None needs the policy's whole weights to copy, and they are sharded. Pass a value_model."
        )
    config = copy.deepcopy(core.config)
    config.num_labels = 1
    # It trains, also where the policy is the 16-bit base of an adapter.
    dtype = torch.promote_types(core.dtype, torch.float32)
    made: Any = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
    adapted: Any = policy
    if is_peft_model(policy) and hasattr(adapted.base_model, "unload"):  # whose adapter wraps layers
        decoder = copy.deepcopy(adapted).unload().base_model
    else:
        decoder = core.base_model
    made.base_model.load_state_dict(decoder.state_dict())
    head = head_of(made)
    assert head is not None
    for parameter in head.parameters():
        torch.nn.init.zeros_(parameter)
    return made.to(next(core.parameters()).device)


def check_windows(parts: Parts, reference: Reference, sets: Sequence[Any], room: int) -> None:
    """Raise ValueError where the value model or the reference has fewer positions than a rollout may have tokens.

    `sets` hold tokenised prompts (a data set, several by name, or None), each answered with up to `room` tokens.
    """
    every = [part for rows in sets for part in (rows.values() if isinstance(rows, dict) else [rows])]
    longest = max((len(ids) for part in every if part is not None for ids in part["input_ids"]), default=0)
    needed = min(longest + room, context_length_of(parts.policy.model) or math.inf)
    readers = {"value_model": parts.model.value_model, "ref_model": getattr(reference, "module", None)}
    for name, model in readers.items():
        window = None if model is None else context_length_of(model)
        if window is not None and window < needed:
            raise ValueError(
                f"{name} has positions for {window} tokens, a prompt with its response may have {needed} (the longest "
                f"prompt has {longest}, response_length is {room}). Shorten either, or pass a {name} with a longer "
                "context length."
            )


def check_sizes(args: PPOConfig) -> RolloutSizes:
    """The sizes of a rollout batch; those of the config are filled in.

    Raises: ValueError for a size that is not the one that follows from the others.
    """
    device, turns = args.per_device_train_batch_size, args.gradient_accumulation_steps
    parts, processes = args.num_mini_batches, args.world_size or 1
    sizes = RolloutSizes(device * turns * parts * processes, parts, args.num_ppo_epochs, turns, processes)
    for name, value in batch_sizes(sizes).items():
        if getattr(args, name) not in (None, value):
            raise ValueError(
                f"{name}={getattr(args, name)} was given, but per_device_train_batch_size={device}, "
                f"gradient_accumulation_steps={turns}, num_mini_batches={parts} and world_size={processes} make it "
                f"{value}. Leave {name} out, or change those."
            )
        setattr(args, name, value)
    return sizes


def own_copy(args: PPOConfig | None) -> PPOConfig:
    """A copy of a config, into which the trainer writes what follows from it.

    Raises: TypeError for another kind of config.
    """
    config = PPOConfig("ppo") if args is None else copy.copy(args)
    if not isinstance(config, PPOConfig):
        raise TypeError(
            f"args must be a trl.experimental.ppo.PPOConfig, got {type(args).__module__}.{type(args).__name__}. "
            "trl.PPOTrainer takes the config of the step-level trainer."
        )
    config.accelerator_config = copy.copy(config.accelerator_config)
    return config


def end_token(args: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that ends a response, None for none.

    Raises: ValueError where the tokenizer lacks an end that the settings need.
    """
    eos: Any = tokenizer.eos_token_id
    wants = "stop_token='eos'" if args.stop_token == "eos" else None
    if wants is None and args.missing_eos_penalty is not None and args.stop_token_id is None:
        wants = f"missing_eos_penalty={args.missing_eos_penalty}"
    if wants and eos is None:
        raise ValueError(
            f"{wants} needs an end-of-sequence token, and the tokenizer has none. Set tokenizer.eos_token, or "
            "stop_token_id."
        )
    return eos if args.stop_token == "eos" else args.stop_token_id


def all_rewards(reward_model: Any, reward_funcs: Any, value_model: nn.Module) -> list[RewardFunc]:
    """The reward model and the functions, whose scores are added.

    Raises: ValueError where there is none, or the value model is one of them.
    """
    several = reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    sources = [source for source in (reward_model, *several) if source is not None]
    if not sources:
        raise ValueError("reward_model and reward_funcs are both None. Pass at least one of them.")
    if any(source is value_model for source in sources):
        raise ValueError(
            "value_model is the reward model itself: training it would change the rewards. Load it a second time."
        )
    return sources
