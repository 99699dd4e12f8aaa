"""Completions in several turns, with tools that the policy calls in between, and what is logged of the calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from trl.data.formats import remove_none_values
from trl.data.prompts import PROMPT_IDS
from trl.data.rendering import ProcessingClass
from trl.generation.engine import Generated
from trl.rollouts.maker import Completed, RolloutMaker, Rows
from trl.rollouts.tool_loop import CALLS, FAILED_OF, LIMITED, ToolLoop, experience_of
from trl.rollouts.tool_runs import FAILURES
from trl.rollouts.tool_schemas import Tool
from trl.rollouts.tool_turns import check_tool_template
from trl.tensors.reduce import Weighted, weighted

_TEMPLATE_KWARGS = "chat_template_kwargs"


class ToolCompleter:
    """Completes prompts by the policy and the tools that it calls; see `ToolLoop` for `limits`."""

    exact = True

    def __init__(
        self,
        tools: Mapping[str, Tool],
        processing_class: ProcessingClass,
        *,
        template_kwargs: Mapping[str, Any] | None,
        **limits: Any,
    ) -> None:
        self.functions = [tool.function for tool in tools.values()]
        self.schemas = [dict(tool.schema) for tool in tools.values()]
        self._template_kwargs = template_kwargs or {}
        check_tool_template(processing_class, self.schemas, template_kwargs=self._template_kwargs)
        self._loop = ToolLoop(processing_class, tools, **limits)

    def __call__(self, maker: RolloutMaker, rows: Rows, *, streams: Sequence[int]) -> Completed:
        def speak(
            contexts: Sequence[Sequence[int]], *, streams: Sequence[int], limits: Sequence[int]
        ) -> list[Generated]:
            with maker.accelerator.autocast():
                return maker.engine.generate(contexts, maker.sampling, streams=streams, limits=limits)

        self._loop.agree = _agreement(maker)
        own = rows.get(_TEMPLATE_KWARGS) or [None] * len(streams)
        episodes = self._loop.play(
            rows[PROMPT_IDS],
            speak,
            maker.sampling,
            streams=streams,
            template_kwargs=[{**self._template_kwargs, **remove_none_values(each or {})} for each in own],
        )
        return Completed(experience_of(episodes), messages=[episode.messages for episode in episodes])


def _agreement(maker: RolloutMaker) -> Callable[[bool], bool]:
    """Whether all processes are done, where they generate together; else each is done by itself."""
    if maker.accelerator.num_processes == 1 or not maker.engine.together:
        return bool
    return lambda done: all(gather_object([done]))


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
