"""The parts of a trainer that learns from its own rollouts, put together and checked before the first step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn

from trl.agents.completer import Agent, AgentCompleter
from trl.data.formats import has_images
from trl.data.prompts import PromptSets
from trl.data.streaming import RowStream
from trl.generation.engine import Engine, Sampling
from trl.generation.vllm.server_engine import Served, VLLMServerEngine, served_policy
from trl.methods.method import Batch, Scoring
from trl.methods.online import GroupMethod, OnlineMethod
from trl.models.packed.sequence_group import SequenceGroup
from trl.models.parts import causal_core, check_decoder_only, embedded_tokens
from trl.models.peft import AdapterConfig
from trl.models.policy import Policy, set_up_policy
from trl.models.reference import Reference
from trl.models.scoring.causal import Scorer
from trl.models.scoring.head import ScoreOptions
from trl.models.switches import without_ddp
from trl.models.teacher import Teacher
from trl.rewards.source import ProcessingClasses, RewardSources
from trl.rollouts.experience import OLD, PLACE, REF, SAMPLING_LOGPS, STUDENT, TEACHER, VALUES, Experience, concatenate
from trl.rollouts.maker import Completer
from trl.rollouts.schedule import RolloutSizes
from trl.trainer import group_setup
from trl.trainer.arguments import AnyDataset, AnyModel, EvalDatasets, Processor
from trl.trainer.group_setup import Environments, RewardFuncs, RolloutFunc, Tools
from trl.trainer.grpo_config import RolloutTraining


@dataclass(frozen=True)
class OnlineParts:
    """What an online trainer is made of, before transformers' constructor has the accelerator."""

    policy: Policy
    method: GroupMethod
    sizes: RolloutSizes
    sampling: Sampling
    sets: PromptSets
    train_dataset: Dataset | RowStream
    eval_dataset: Dataset | dict[str, Dataset] | None
    rewards: RewardSources
    reference: Reference | None
    teacher: Teacher | None
    completer: Completer | None
    """Agents, images or tools; None where the policy alone completes prompts, or a `rollout_func`."""
    served: Served | None

    def engine(self, args: RolloutTraining, model: nn.Module | None, accelerator: Accelerator) -> Engine:
        """The engine of rollouts, which agents need live."""
        engine = group_setup.engine_of(args, model, self.policy, accelerator, served=self.served)
        if isinstance(self.completer, AgentCompleter) and not isinstance(engine, VLLMServerEngine):
            engine.check_live()
        return engine


def online_parts(
    args: RolloutTraining, method_type: type[GroupMethod], model: AnyModel, *,
    processing_class: Processor | None, peft_config: AdapterConfig,
    train_dataset: AnyDataset | None, eval_dataset: EvalDatasets | None,
    reward_funcs: RewardFuncs, reward_processing_classes: ProcessingClasses,
    tools: Tools | None, rollout_func: RolloutFunc | None, teacher_model: AnyModel | None,
    ref_model: AnyModel | None, agent: Agent | None,
    environment_factory: Environments | None, completer: Completer | None, shares_tokens: bool,
) -> OnlineParts:  # fmt: skip
    """The parts, of the arguments of `OnlineTrainer`. Raises: TypeError, ValueError for what does not fit together."""
    by_policy = not group_setup.has_completer(rollout_func, completer)
    served = group_setup.check_engine(args)
    assert args.num_generations is not None
    sizes = replace(args.rollout_sizes(), group=args.num_generations)
    policy = set_up_policy(model, args, processing_class, peft_config, shares_tokens=shares_tokens)
    if served is not None:
        policy = served_policy(policy, args, served)
    check_decoder_only(causal_core(policy.model))
    sampling = group_setup.sampling_of(args, policy)
    excluded = {"tools": tools, "rollout_func": rollout_func, "completer": completer}
    excluded["images"] = has_images(train_dataset, eval_dataset)
    agents = group_setup.agent_completer(agent, environment_factory, args, policy, rewards=reward_funcs, **excluded)
    if agents is not None:
        reward_funcs, tools = group_setup.agent_rewards(reward_funcs, agents), None
    if environment_factory is not None and train_dataset is None:
        train_dataset = group_setup.seed_rows(args, sizes)
    rows, eval_rows = (group_setup.environment_rows(agents, dataset) for dataset in (train_dataset, eval_dataset))
    rewards = group_setup.group_rewards(reward_funcs, reward_processing_classes, args, policy)
    tool_loop = None
    if environment_factory is None:
        tool_loop = group_setup.tool_completer(tools, args, policy, rows, eval_rows, generates=not by_policy)
    schemas = tool_loop.schemas if tool_loop else None
    sets = group_setup.prompt_sets(args, policy, rows, eval_rows, tools=schemas, by_policy=by_policy)
    reference = group_setup.reference_of(args, policy, model, ref_model)
    method = method_type(args)
    teacher = group_setup.teacher_of(teacher_model, args, policy, needed=method.needs_teacher)
    vocabulary = getattr(teacher, "vocabulary", None)
    if vocabulary is not None and vocabulary < embedded_tokens(policy.scorer.core):
        sampling = replace(sampling, vocabulary=vocabulary)
        sets.settings = replace(sets.settings, vocabulary=vocabulary)
    return OnlineParts(
        policy, method, sizes, sampling, sets,
        train_dataset=group_setup.training_prompts(sets, rows, args),
        eval_dataset=sets.every(eval_rows),
        rewards=rewards,
        reference=reference,
        teacher=teacher,
        completer=completer or agents or getattr(sets, "images", None) or tool_loop,
        served=served,
    )  # fmt: skip


def rows_of_group(group: SequenceGroup | None, experience: Experience) -> tuple[Experience, slice]:
    """The rows of all processes that share tokens, with their places, and which tokens are those of this process."""
    shares, rank = ([experience], 0) if group is None else (group.objects(experience), group.rank)
    rows = experience if group is None else concatenate(shares)
    first = sum(len(share.completions.values) for share in shares[:rank])
    tokens = slice(first, first + len(experience.completions.values))
    return rows.with_rows(**{PLACE: torch.arange(len(rows))}), tokens


def columns_to_score(
    experience: Experience, method: OnlineMethod, *, is_exact: bool, is_reused: bool, has_reference: bool,
    temperature: float, learning: bool,
) -> tuple[Experience, list[str]]:  # fmt: skip
    """Rows, and the names of the columns that a method needs beside theirs.

    `is_exact`: the sampler's log-probs are the policy's, and become the old ones. `is_reused`: several optimiser steps
    learn from the rows. `temperature`: that of sampling.
    """
    columns, is_exact = experience.per_token, is_exact and not method.compares_old
    if is_exact:
        experience = experience.with_tokens(**{OLD: columns[SAMPLING_LOGPS]})
    wanted = {
        REF: has_reference and method.scores_reference,
        OLD: not is_exact and (is_reused or method.needs_old(experience)),
        TEACHER: method.scores_teacher,
        STUDENT: method.scores_teacher and (method.teacher_temperature or temperature) != temperature,
        VALUES: learning and method.needs_values,
    }
    return experience, [name for name, is_wanted in wanted.items() if is_wanted and name not in columns]


@torch.no_grad()
def score_rows(
    scoring: Scoring, batch: Batch, names: Sequence[str], *, reference: Reference | None, of_teacher: float
) -> dict[str, Tensor]:
    """Columns `(K,)` of the completion tokens by name: log-probs of policy, reference and teacher, and values.

    `of_teacher`: the temperature of the teacher's log-probs.
    """
    columns, policy, scorer = dict[str, Tensor](), without_ddp(scoring.model), scoring.scorer
    options, teacher_options = (ScoreOptions(temperature=number) for number in (scoring.temperature, of_teacher))
    teacher = getattr(scoring.teacher, "reference", None)
    with scoring.accelerator.autocast():
        if OLD in names:
            scored = scorer.score(policy, batch, options)
            columns = {OLD: scored.logps}
            if scored.values is not None:
                columns[VALUES] = scored.values
        elif VALUES in names:
            columns[VALUES] = scorer.score_values(policy, batch)
        for name, model, settings in ((REF, reference, options), (TEACHER, teacher, teacher_options)):
            if name in names:
                assert model is not None
                columns[name] = model.score(scoring.model, batch, partial(_logps, options=settings))
        if STUDENT in names:
            columns[STUDENT] = scorer.score(policy, batch, teacher_options).logps
    return columns


def _logps(scorer: Scorer, model: nn.Module, batch: Batch, *, options: ScoreOptions) -> Tensor:
    """Log-probs of the scored tokens, in order."""
    return scorer.score(model, batch, options).logps
