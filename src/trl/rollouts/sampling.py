"""From prompts to completions as an `Experience`, and to the inputs of reward functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trl.data.formats import is_list_of_dicts_with
from trl.data.rendering import Message
from trl.generation.engine import Engine, Sampling
from trl.rewards.inputs import RewardInputs
from trl.rollouts.columns import SAMPLING_KEPT, SAMPLING_LOGPS, STOPPED
from trl.rollouts.experience import Experience
from trl.tensors.ragged import Ragged


def sample(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    streams: Sequence[int],
    **inputs: Any,
) -> Experience:
    """One completion of each prompt, on the CPU.

    Per token: `sampling_logps` under the distribution that was sampled from, and if it was truncated `sampling_kept`, the log of
    the kept mass. Per row: `stopped`, whether a stop token or string ended it.
    """
    found = engine.generate(prompts, sampling, streams=streams, **inputs)
    per_token = {SAMPLING_LOGPS: torch.cat([one.logps for one in found])}
    kept = [one.kept for one in found]
    if all(part is not None for part in kept):
        per_token[SAMPLING_KEPT] = torch.cat([part for part in kept if part is not None])
    stopped = torch.tensor([one.finish_reason == "stop" for one in found])
    return Experience(
        Ragged.of(prompts), Ragged.of([one.ids for one in found]), per_token, {STOPPED: stopped}
    )


def reward_inputs(
    experience: Experience,
    rows: Mapping[str, Sequence[Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    columns: Sequence[str],
    trainer_state: Any = None,
) -> RewardInputs:
    """Inputs of reward functions: completions as text, or as a message if prompts are messages.

    A message that the prompt begins is part of the completion. `rows` are columns of the dataset, of which `columns` are passed on.
    Without a column `prompt`, prompts are the text of their tokens.
    """
    prompt_ids, completion_ids = _lists(experience.prompts), _lists(experience.completions)
    prompts = rows.get("prompt")
    texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    if prompts is None:
        prompts = tokenizer.batch_decode(prompt_ids, skip_special_tokens=True)
    completions: Sequence[Any] = texts
    if len(prompts) and is_list_of_dicts_with(prompts[0], "role"):
        prompts, completions = zip(*map(_answered, prompts, texts), strict=True)
    return RewardInputs(
        prompts=list(prompts),
        completions=list(completions),
        completion_ids=completion_ids,
        prompt_ids=prompt_ids,
        columns={name: list(rows[name]) for name in columns},
        trainer_state=trainer_state,
    )


def _answered(prompt: Sequence[Message], text: str) -> tuple[list[Message], list[Message]]:
    """A conversation without, and with, the assistant's message, including its beginning in the prompt.

    >>> _answered([{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "<think>"}], "Hm.")
    ([{'role': 'user', 'content': 'Why?'}], [{'role': 'assistant', 'content': '<think>Hm.'}])
    """
    head, begun = split_begun(prompt)
    return head, [{"role": "assistant", "content": begun + text}]


def split_begun(prompt: Sequence[Message]) -> tuple[list[Message], str]:
    """The messages before the assistant's last one, and the text of that one; all messages and "" without one."""
    if prompt[-1].get("role") != "assistant":
        return list(prompt), ""
    content = prompt[-1].get("content") or ""
    parts = [content] if isinstance(content, str) else [part.get("text") or "" for part in content]
    return list(prompt[:-1]), "".join(parts)


def with_begun(
    prompts: Sequence[Sequence[Message]], completions: Sequence[Sequence[Message]]
) -> list[list[Message]]:
    """Completions of several messages, of which the first includes its beginning in the prompt."""
    return [_begun(prompt, messages) for prompt, messages in zip(prompts, completions, strict=True)]


def _begun(prompt: Sequence[Message], messages: Sequence[Message]) -> list[Message]:
    begun, content = split_begun(prompt)[1], str(messages[0].get("content") or "")
    if content.startswith(begun):  # a response template may include it
        return list(messages)
    return [{**messages[0], "content": begun + content}, *messages[1:]]


def _lists(ragged: Ragged) -> list[list[int]]:
    return [row.tolist() for row in ragged.split()]


def ends_with(experience: Experience, token: int | None) -> Tensor:
    """Rows that stopped or contain this token: bool `(B,)`."""
    found = experience.per_row[STOPPED].bool()
    if token is None:
        return found
    hits = torch.zeros(len(experience), dtype=torch.int64)
    hits.index_add_(0, experience.completions.row_index, (experience.completions.values == token).long())
    return found | (hits > 0)
