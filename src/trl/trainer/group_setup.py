"""What a trainer of groups is made of, put together and checked before the first step."""

from __future__ import annotations

from typing import Any

from trl.generation.engine import Sampling
from trl.generation.stopping import end_tokens
from trl.models.parts import causal_core
from trl.models.reference import Reference, make_reference
from trl.rewards.source import RewardSources
from trl.trainer.grpo_config import GroupTraining
from trl.trainer.policy import Policy, make_scorer
from trl.trainer.prompt_sets import PromptSets
from trl.trainer.reward_setup import tokenizers_for


def prompt_sets(args: GroupTraining, policy: Policy) -> PromptSets:
    """How data sets are prepared."""
    return PromptSets(
        policy,
        ("max_completion_length", args.max_completion_length),
        keep=args.max_prompt_length,
        template_kwargs=args.chat_template_kwargs,
    )


def sampling_of(args: GroupTraining, policy: Policy) -> Sampling:
    """How completions are drawn: until the tokenizer's end token or one of the model's own.

    Raises: ValueError for settings that always take the likeliest token.
    """
    ends = set(end_tokens(None, causal_core(policy.model)))
    if policy.tokenizer.eos_token_id is not None:
        ends.add(policy.tokenizer.eos_token_id)  # type: ignore[arg-type]
    sampling = Sampling(
        max_new_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        stop_token_ids=tuple(sorted(ends)),
        seed=args.seed,
    )
    sampling = sampling.updated(args.generation_kwargs)
    if sampling.greedy:
        raise ValueError(
            f"generation_kwargs={args.generation_kwargs} always takes the likeliest token, expected do_sample=True and a "
            "temperature > 0: completions of a prompt that are all the same teach nothing. Leave it out."
        )
    return sampling


def reference_of(args: GroupTraining, policy: Policy, model: Any) -> Reference | None:
    """What the divergence is measured from: the policy as it is now, or the base of its adapter; None for beta = 0."""
    if args.beta == 0:
        return None
    return make_reference(
        policy.model,
        scorer=policy.scorer,
        make_scorer=lambda made: make_scorer(made, policy.tokenizer),
        model_path=model if isinstance(model, str) else None,
        model_init_kwargs=args.model_init_kwargs,  # type: ignore[arg-type]
    )


def reward_sources(
    reward_funcs: Any, processing_classes: Any, args: GroupTraining, policy: Policy
) -> RewardSources:
    """Where rewards come from.

    Raises: ValueError where there is no source.
    """
    given = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    if not given or any(each is None for each in given):
        raise ValueError(
            f"reward_funcs is {reward_funcs!r}, expected functions, reward models or their paths. Pass at least one."
        )
    return RewardSources(
        given,
        weights=args.reward_weights,
        processing_classes=tokenizers_for(given, processing_classes, policy),
        deadline=args.reward_deadline,
        on_failure=args.reward_failure,
        policy_tokenizer=policy.tokenizer,
        batch_size=args.per_device_train_batch_size,
    )
