"""The parts of a trainer of groups, put together and checked before the first step."""

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from datasets import Dataset, IterableDataset
from torch import nn

from trl.agents.completer import Agent, AgentCompleter
from trl.agents.endpoint import check_host
from trl.agents.environments import EnvironmentAgent, with_prompts
from trl.agents.journal import Journal
from trl.agents.sessions import Budget
from trl.agents.tool_loop import ToolLoop
from trl.agents.tools import tools_of
from trl.data.formats import has_images
from trl.data.prompts import PromptPreparation, PromptSets
from trl.data.rendering import Json
from trl.data.streaming import RowStream
from trl.generation.engine import Sampling
from trl.generation.teacher_servers import served_teacher
from trl.generation.transformers.engine import TransformersEngine, context_length_of
from trl.generation.transformers.requests import stop_tokens
from trl.generation.vllm.backend import check_vllm
from trl.generation.vllm.engine import VLLMEngine
from trl.generation.vllm.server_engine import Served, VLLMServerEngine, served_of
from trl.models.parts import embedded_tokens
from trl.models.policy import Policy
from trl.models.reference import Reference, make_reference
from trl.models.teacher import Teacher, make_teacher, own_teacher
from trl.options.checks import json_object, warn_unread
from trl.options.generation import AGENT_SETTINGS, TOOL_SETTINGS
from trl.rewards.functions import column_reward
from trl.rewards.source import ProcessingClasses, RewardFunc, RewardSources
from trl.rollouts.maker import Completer, check_completer
from trl.rollouts.rollout_func import check_rollout_func
from trl.rollouts.schedule import RolloutSizes
from trl.trainer.arguments import AnyDataset
from trl.trainer.group_images import ImagePromptSets
from trl.trainer.grpo_config import GroupTraining, RolloutTraining
from trl.trainer.loaders import order_seed

AnySets = AnyDataset | Mapping[str, AnyDataset] | None
RolloutFunc = Callable[[list[Any], Any], Mapping[str, Any]]
RewardFuncs = RewardFunc | Sequence[RewardFunc] | None
Tools = Sequence[Callable[..., Any]]
Environments = Callable[[], object] | Mapping[str, Callable[[], object]]


def has_completer(rollout_func: RolloutFunc | None, completer: Completer | None) -> bool:
    """Whether something else than the policy completes prompts. Raises: TypeError or ValueError for what cannot."""
    if rollout_func is not None:
        check_rollout_func(rollout_func)
    if completer is not None:
        check_completer(completer)
    if rollout_func is not None and completer is not None:
        raise ValueError("rollout_func and completer cannot be combined. Leave one of them out.")
    return rollout_func is not None or completer is not None


def prompt_sets(
    args: RolloutTraining, policy: Policy, *datasets: AnySets, tools: list[Json] | None = None, by_policy: bool = True
) -> PromptSets:
    """The preparation of data sets; with images where one of `datasets` (or of dicts of them) has some.

    `tools` are the schemas that prompts show; `by_policy` is False for a rollout_func or completer.

    Raises: ImportError, TypeError or ValueError for settings and models that cannot train on rows with images.
    """
    settings = PromptPreparation(
        vocabulary=embedded_tokens(policy.model),
        num_proc=getattr(args, "dataset_num_proc", None),
        keep=args.max_prompt_length,
        template_kwargs=args.chat_template_kwargs,  # type: ignore[arg-type]
        tools=tools,
    )
    length = rollout_window(args, policy) if by_policy else context_length_of(policy.model)
    limits: Any = {"context_length": length, "room": ("max_completion_length", args.max_completion_length)}
    if has_images(*datasets):
        if args.use_vllm or not by_policy:
            raise ValueError(
                f"{'use_vllm=True' if by_policy else 'a rollout_func or completer'} was given with rows of images, "
                "expected that the policy itself generates. Leave it out, or remove the column of images to train on "
                "text."
            )
        return ImagePromptSets(policy, settings, **limits)
    return PromptSets(policy.processing_class, settings, **limits)


def training_prompts(sets: PromptSets, dataset: AnyDataset | None, args: RolloutTraining) -> Dataset | RowStream:
    """The rows that a trainer of groups draws its prompts from.

    Raises: TypeError or ValueError for no data set of prompts, and for a stream with settings that need its length.
    """
    if not isinstance(dataset, IterableDataset):
        return sets(dataset, "train")
    resamples = isinstance(args, GroupTraining) and args.dynamic_sampling
    if args.max_steps <= 0 or resamples:
        setting = "dynamic_sampling=True" if resamples else f"max_steps={args.max_steps}"
        raise ValueError(
            f"train dataset is a stream, which needs max_steps > 0 and dynamic_sampling=False, got {setting}. Change "
            "it, or load the data set without streaming."
        )
    return sets.stream(dataset, shuffle_seed=order_seed(args) if args.shuffle_dataset else None)


def rollout_window(args: RolloutTraining, policy: Policy) -> int | None:
    """The most tokens of prompt and completion, of the model and vLLM; None for no limit."""
    served = getattr(args, "vllm_max_model_length", None) if args.use_vllm else None
    lengths = [length for length in (served, policy.context_length) if length is not None]
    return context_length_of(policy.model, min(lengths, default=None))


def sampling_of(args: RolloutTraining, policy: Policy) -> Sampling:
    """The sampling of completions, which end with the tokenizer's end token or one of the model's own.

    Raises: ValueError for greedy sampling.
    """
    sampling = Sampling(
        max_new_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        stop_token_ids=tuple(stop_tokens(policy.model, policy.tokenizer)),
        seed=args.seed,
    )
    sampling = sampling.updated(args.generation_kwargs)
    if args.use_vllm:
        sampling.refuse_processors("vLLM")
    if sampling.greedy:
        raise ValueError(
            f"generation_kwargs={args.generation_kwargs} samples greedily, so that all completions of a prompt are "
            "equal. Leave it out: do_sample=True and a temperature > 0 are needed."
        )
    return sampling


def check_engine(args: RolloutTraining) -> Served | None:
    """The running vLLM server of a run; None without one.

    Raises: ImportError for vLLM in this process that is not installed, and the errors of `served_of`.
    """
    if not args.use_vllm:
        return None
    if args.vllm_mode == "server":
        return served_of(args)
    check_vllm()
    return None


def engine_of(
    args: RolloutTraining,
    model: nn.Module | None,
    policy: Policy,
    accelerator: Accelerator,
    *,
    served: Served | None = None,
) -> TransformersEngine | VLLMEngine | VLLMServerEngine:
    """The engine: vLLM in the server that was found or in this process, or the policy itself."""
    assert model is not None
    if served is not None:
        return VLLMServerEngine(
            model,
            served.client,
            accelerator=accelerator,
            context_length=rollout_window(args, policy),
            regex=args.vllm_guided_decoding_regex,
            patience=args.vllm_server_timeout,
        )
    parts = {"tokenizer": policy.tokenizer, "accelerator": accelerator}
    if not args.use_vllm:
        return TransformersEngine(model, gather_zero3=args.ds3_gather_for_generation, **parts)
    return VLLMEngine(
        model,
        memory=args.vllm_gpu_memory_utilization,
        context_length=getattr(args, "vllm_max_model_length", None),
        implementation=args.vllm_model_impl,
        sleeps=args.vllm_enable_sleep_mode,
        regex=args.vllm_guided_decoding_regex,
        parallel=args.vllm_tensor_parallel_size,
        **parts,
    )


def reference_of(
    args: RolloutTraining, policy: Policy, model: str | nn.Module, ref_model: str | nn.Module | None = None
) -> Reference | None:
    """The reference: `ref_model`, a copy of the policy, or the base of its adapter; None for beta = 0.

    Raises: ValueError for a `ref_model` that would have no effect.
    """
    beta = args.beta if isinstance(args, GroupTraining) else 0.0
    if beta == 0:
        if ref_model is not None:
            raise ValueError(
                f"ref_model was given with beta={beta}, which measures no divergence from it. Set beta (0.04, say), or "
                "leave ref_model out."
            )
        return None
    path = model if isinstance(model, str) else None
    return make_reference(policy.model, policy.scorer, ref_model, args=args, path=path)


def group_rewards(
    reward_funcs: RewardFuncs, processing_classes: ProcessingClasses, args: RolloutTraining, policy: Policy
) -> RewardSources:
    """The reward sources of groups; a method without rewards has one that returns 0.

    Raises: ValueError without any, and for a judge that would not see all completions of a prompt.
    """
    if not isinstance(args, GroupTraining):
        return RewardSources([no_reward])
    at_once, generations = args.per_device_train_batch_size, args.num_generations or 0
    sources = reward_sources(reward_funcs, processing_classes, args, policy, batch_size=at_once)
    sources.check_groups(generations, rows=args.rollout_sizes().own_rows)
    if args.generation_parts > 1 and sources.models:
        raise ValueError(
            f"generation_parts={args.generation_parts} computes rewards beside the generation, which reward models do "
            "not. Set it to 1, or use functions and judges alone."
        )
    if args.eval_strategy != "no":
        sources.check_groups(args.num_generations_eval or generations, rows=args.eval_batch_size)
    return sources


def reward_sources(
    reward_funcs: RewardFuncs,
    processing_classes: ProcessingClasses,
    args: Any,
    policy: Policy,
    *,
    batch_size: int,
    **more: Any,
) -> RewardSources:
    """The reward sources, of a config with the options of `RewardPolicy`; `more` are further arguments of
    `RewardSources`.

    Raises: ValueError without any.
    """
    functions: Any = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    if not functions or any(function is None for function in functions):
        raise ValueError(
            f"reward_funcs is {reward_funcs!r}, expected functions, reward models or their paths. Pass at least one."
        )
    return RewardSources(
        functions,
        weights=args.reward_weights,
        processing_classes=processing_classes,
        deadline=args.reward_deadline,
        on_failure=args.reward_failure,
        policy_tokenizer=policy.tokenizer,
        batch_size=batch_size,
        **more,
    )


def no_reward(completions: Sequence[object], **columns: object) -> list[float]:
    """0 for each completion."""
    return [0.0] * len(completions)


def teacher_of(
    teacher: str | nn.Module | Mapping[str, object] | None, args: RolloutTraining, policy: Policy, *, needed: bool
) -> Teacher | None:
    """The teacher that was passed, or that the config names, or one made of the policy; None where none is needed.

    Raises: ValueError without a teacher, or with one that would have no effect.
    """
    if kind := getattr(args, "teacher_model_kind", None):
        return own_teacher(kind, policy.model, policy.scorer)
    names = ("teacher_model_server_url", "teacher_model_name_or_path")
    teacher = teacher or next(filter(None, (getattr(args, name, None) for name in names)), None)
    if isinstance(teacher, Mapping) or (isinstance(teacher, str) and teacher.lstrip().startswith("{")):
        names = list(teacher if isinstance(teacher, Mapping) else json_object("teacher_model", teacher) or ())
        raise ValueError(
            f"teacher_model has several teachers, {names}, which prompts do not choose "
            "among. Give one teacher, or use GKDTrainer, where rows choose."
        )
    if hasattr(args, names[0]):
        size = embedded_tokens(policy.scorer.core)
        served = served_teacher(teacher, args, policy.tokenizer, vocabulary=size)
        if served is not None:
            return served
    if needed:
        kwargs: Any = getattr(args, "teacher_model_init_kwargs", None)
        return make_teacher(teacher, kwargs, policy.model, policy.tokenizer, scorer=policy.scorer)
    if teacher is not None:
        raise ValueError(
            "teacher_model was given with teacher_kl_coef=0, which learns nothing from it. Set teacher_kl_coef (1.0, "
            "say), or leave the teacher out."
        )
    return None


def agent_completer(
    agent: Agent | None,
    environment_factory: Environments | None,
    args: RolloutTraining,
    policy: Policy,
    *,
    rewards: RewardFuncs,
    tools: Tools | None,
    **other: object,
) -> AgentCompleter | None:
    """The agent of a run, or its environments as one; None for neither. `other` are what they exclude, by name.

    Environments may have `tools` beside their own, and need `rewards` if they give none.

    Raises: TypeError for an object that is no agent or environment, ValueError for a combination that cannot work.
    """
    if agent is None and environment_factory is None:
        warn_unread(args, AGENT_SETTINGS, "without an agent. Pass one to the trainer, or leave it out")
        return None
    name = "environment_factory" if agent is None else "agent"
    if agent is not None:
        other = {"tools": tools, **other, "environment_factory": environment_factory}
    elif isinstance(args, GroupTraining) and args.generation_parts > 1:
        other["generation_parts > 1"] = True
    other["ds3_gather_for_generation=False"] = not (args.ds3_gather_for_generation or args.use_vllm)
    if excluded := [name for name, is_given in other.items() if is_given]:
        raise ValueError(f"{name} cannot be combined with {', '.join(excluded)}. Leave one of them out.")
    kwargs: Any = {"template_kwargs": args.chat_template_kwargs}
    length, folder, environments = None, None, list[type]()
    if agent is not None:
        if not (find_spec("fastapi") and find_spec("uvicorn")):
            raise ImportError("agent needs a server. Install it with `pip install 'trl[serve]'`.")
        check_host(args.agent_host)
        player: Agent | EnvironmentAgent = agent
    else:
        assert environment_factory is not None
        player = EnvironmentAgent(
            environment_factory, policy.processing_class, tools or (), keeps=bool(rewards),
            iterations=args.max_tool_calling_iterations, deadline=args.tool_deadline, **kwargs,
        )  # fmt: skip
        if rewards:  # which read them
            environments = [type(environment) for environment in player.made]
        length = args.max_completion_length
    if args.save_strategy != "no" or args.agent_keep_sessions:
        folder = Path(args.output_dir or ".") / "sessions"
    return AgentCompleter(
        player,
        policy.processing_class,
        Budget(args.agent_max_turns, args.agent_max_tokens, length=length),
        concurrency=args.agent_concurrency,
        deadline=args.agent_deadline,
        agent_sampling=args.agent_sampling,
        host=args.agent_host,
        journal=Journal(folder, rank=args.process_index, keeps=args.agent_keep_sessions, environments=environments),
        graded=bool(rewards),
        **kwargs,
    )


def agent_rewards(reward_funcs: RewardFuncs, agents: AgentCompleter) -> list[RewardFunc]:
    """The reward sources of a run with an agent: its own come last. Raises: ValueError for none."""
    functions: Any = [] if reward_funcs is None else reward_funcs
    functions = functions if isinstance(functions, (list, tuple)) else [functions]
    if not functions and not agents.reward_names:
        raise ValueError("there are no reward_funcs, and no environment has get_reward. Give one of them.")
    return [*functions, *map(column_reward, agents.reward_names)]


def environment_rows(agents: Completer | None, dataset: Any) -> Any:
    """A data set, or several by name, in the form of the run: with agents and environments each row has a prompt.

    Raises: ValueError for rows that do not fit the environments.
    """
    if isinstance(dataset, dict):
        return {name: environment_rows(agents, rows) for name, rows in dataset.items()}
    if not isinstance(agents, AgentCompleter):
        return dataset
    if agents.environments is not None:
        return agents.environments.rows(dataset)
    return with_prompts(dataset) if isinstance(dataset, (Dataset, IterableDataset)) else dataset


def seed_rows(args: RolloutTraining, sizes: RolloutSizes) -> Dataset:
    """A data set for environments that have their own data: a `seed` for each prompt of the run.

    Raises: ValueError without `max_steps`.
    """
    if args.max_steps <= 0:
        raise ValueError(f"environment_factory without train_dataset needs max_steps > 0, got {args.max_steps}.")
    return Dataset.from_dict({"seed": list(range(math.ceil(args.max_steps / sizes.steps) * sizes.prompts))})


def tool_completer(
    tools: Tools | None, args: RolloutTraining, policy: Policy, *datasets: AnySets, generates: bool = False
) -> ToolLoop | None:
    """The tools of a run on some data sets (or dicts of them); None for none.

    Raises: TypeError or ValueError for functions that cannot be tools, a chat template without tools, and settings that
    do not go with them.
    """
    if not tools:
        warn_unread(args, TOOL_SETTINGS, "without tools. Pass tools to the trainer, or leave it out")
        return None
    functions = tools_of(tools)
    unsupported = {
        "images in the data set": has_images(*datasets),
        "a rollout_func or completer, which generates itself": generates,
        "ds3_gather_for_generation=False without vLLM": not (args.ds3_gather_for_generation or args.use_vllm),
    }
    if excluded := [name for name, is_given in unsupported.items() if is_given]:
        raise ValueError(
            f"tools={list(functions)} cannot be combined with {', '.join(excluded)}. Leave one of them out."
        )
    return ToolLoop(
        policy.processing_class,
        functions,
        template_kwargs=args.chat_template_kwargs,  # type: ignore[arg-type]
        iterations=args.max_tool_calling_iterations,
        deadline=args.tool_deadline,
        context_length=rollout_window(args, policy),
    )
