"""What tools add to a trainer of groups: rollouts in turns, completions as messages, and what is logged of calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from trl.data.formats import remove_none_values
from trl.data.rendering import Message
from trl.generation.engine import Generated
from trl.models.policy import Policy
from trl.options.checks import warn_unread
from trl.options.generation import TOOL_SETTINGS
from trl.rewards.inputs import RewardInputs
from trl.rollouts.experience import Experience
from trl.rollouts.sampling import split_begun
from trl.rollouts.tool_loop import CALLS, FAILED_OF, LIMITED, ToolLoop, experience_of
from trl.rollouts.tool_runs import FAILURES
from trl.rollouts.tool_schemas import Tool, tools_of
from trl.rollouts.tool_turns import check_tool_template
from trl.tensors.reduce import Weighted, weighted
from trl.trainer.group_setup import rollout_window
from trl.trainer.grpo_config import GroupTraining
from trl.trainer.sft_images import has_images

MESSAGES = "completion_messages"
_TEMPLATE_KWARGS = "chat_template_kwargs"


class GroupTools:
    """The tools of a run."""

    def __init__(self, tools: Mapping[str, Tool], args: GroupTraining, policy: Policy) -> None:
        self.functions = [tool.function for tool in tools.values()]
        self.schemas = [dict(tool.schema) for tool in tools.values()]
        self.template_kwargs: Mapping[str, Any] = args.chat_template_kwargs or {}  # type: ignore[assignment]
        check_tool_template(policy.processing_class, self.schemas, template_kwargs=self.template_kwargs)
        self.loop = ToolLoop(
            policy.processing_class,
            tools,
            iterations=args.max_tool_calling_iterations,
            deadline=args.tool_deadline,
            window=rollout_window(args, policy),
        )

    def completed(
        self, trainer: Any, rows: Mapping[str, Sequence[Any]], *, streams: Sequence[int]
    ) -> tuple[Experience, Mapping[str, Sequence[Any]]]:
        """Completions of rows of a data set by a trainer's policy and the tools; the rows, with the completions' messages."""
        trainer.engine.sync_weights(trainer.model_wrapped, trainer.state.global_step)
        self.loop.agree = _agreement(trainer)

        def speak(
            contexts: Sequence[Sequence[int]], *, streams: Sequence[int], limits: Sequence[int]
        ) -> list[Generated]:
            with trainer.accelerator.autocast():
                return trainer.engine.generate(contexts, trainer.sampling, streams=streams, limits=limits)

        own = rows.get(_TEMPLATE_KWARGS) or [None] * len(streams)
        episodes = self.loop.play(
            rows["input_ids"],
            speak,
            trainer.sampling,
            streams=streams,
            template_kwargs=[{**self.template_kwargs, **remove_none_values(each or {})} for each in own],
        )
        messages = [episode.messages for episode in episodes]
        return experience_of(episodes), {**{name: rows[name] for name in rows}, MESSAGES: messages}


def group_tools(
    tools: Sequence[Callable[..., Any]] | None,
    args: GroupTraining,
    policy: Policy,
    *datasets: Any,
    rollout_func: Any = None,
) -> GroupTools | None:
    """The tools of a run on some data sets (or dicts of them); None for none.

    Raises: TypeError or ValueError, before the first step, for functions that cannot be tools, a chat template that does not
    carry them, and settings that do not go with them.
    """
    if tools is None or (isinstance(tools, (list, tuple)) and not tools):
        warn_unread(args, TOOL_SETTINGS, "without tools. Pass tools to the trainer, or leave it out")
        return None
    found = tools_of(tools)
    if has_images(*datasets):
        raise ValueError(
            f"tools={list(found)} with images in the data set, expected prompts of text alone: what follows an answer is generated "
            "without them. Leave one of them out."
        )
    if rollout_func is not None:
        raise ValueError(
            f"tools={list(found)} with a rollout_func, expected one of them: the function generates, so that nobody answers calls. "
            "Call the tools in it, or leave it out."
        )
    if not (args.ds3_gather_for_generation or args.use_vllm):
        raise ValueError(
            "ds3_gather_for_generation=False with tools, expected True: processes go on with different numbers of rows, which "
            "sharded weights do not take. Leave it out, or generate with vLLM."
        )
    return GroupTools(found, args, policy)


def _agreement(trainer: Any) -> Callable[[bool], bool]:
    """Whether all processes are done, where they generate together; else each is done by itself."""
    if trainer.args.world_size == 1 or not trainer.engine.together:
        return bool
    return lambda done: all(gather_object([done]))


def with_messages(inputs: RewardInputs, rows: Mapping[str, Sequence[Any]]) -> RewardInputs:
    """What reward functions are asked, with completions as all of their messages."""
    if MESSAGES not in rows:
        return inputs
    said = [_begun(prompt, messages) for prompt, messages in zip(rows["prompt"], rows[MESSAGES], strict=True)]
    return replace(inputs, completions=said)


def _begun(prompt: Sequence[Message], messages: Sequence[Message]) -> list[Message]:
    """A completion's messages, of which the prompt may have begun the first."""
    begun, content = split_begun(prompt)[1], str(messages[0].get("content") or "")
    if content.startswith(begun):  # by a response template that reads the prompt's words too
        return list(messages)
    return [{**messages[0], "content": begun + content}, *messages[1:]]


def tool_metrics(rows: Mapping[str, Tensor], *, share: float) -> dict[str, Weighted]:
    """What is logged of the calls in rows of all processes, of which this one records a `share`.

    `tools/call_frequency`: calls per completion; `tools/failure_frequency`: the share of calls that failed, and
    `tools/failures/<kind>` each kind's; `tools/limit_ratio`: completions that the number of turns cut off. Shares of calls are
    absent where there are none.
    """
    if CALLS not in rows:
        return {}
    calls = rows[CALLS]
    found = {"tools/call_frequency": weighted(calls), "tools/limit_ratio": weighted(rows[LIMITED])}
    if calls.sum():
        failed = {kind: rows[FAILED_OF + kind] for kind in FAILURES}
        found["tools/failure_frequency"] = Weighted(torch.stack(list(failed.values())).sum(), calls.sum())
        found |= {
            f"tools/failures/{kind}": Weighted(each.sum(), calls.sum()) for kind, each in failed.items()
        }
    return {name: Weighted(value.total * share, value.count * share) for name, value in found.items()}
