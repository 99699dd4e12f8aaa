"""Rewards for the form and the length of a completion."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

Completion = str | Sequence[dict[str, Any]]

_THOUGHT_FIRST = re.compile(r"<think>(?!.*<think>).*?</think>", re.DOTALL)


def content_of(completion: Completion) -> str:
    """The text of a completion: itself, or what the last of its messages says.

    Parts of a message that are no text (images) are left out.

    >>> content_of([{"role": "assistant", "content": "Blue."}]), content_of("Blue.")
    ('Blue.', 'Blue.')
    """
    if isinstance(completion, str):
        return completion
    if not completion:
        return ""
    content = completion[-1].get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content if part.get("type") == "text")


def think_format_reward(completions: Sequence[Completion], **kwargs: Any) -> list[float]:
    """1.0 for a completion that begins with one thought, `<think>...</think>`, and 0.0 for any other.

    Nothing may stand before the thought, and no second `<think>` anywhere; what comes after it is free, and may be nothing.
    Source: the format reward of DeepSeek-R1 (arXiv:2501.12948, section 2.2.2).

    >>> think_format_reward([[{"role": "assistant", "content": "<think>Look up.</think>Blue."}], "Blue."])
    [1.0, 0.0]
    """
    return [float(bool(_THOUGHT_FIRST.match(content_of(completion)))) for completion in completions]


def get_soft_overlong_punishment(
    max_completion_len: int, soft_punish_cache: int
) -> Callable[..., list[float]]:
    """A reward function that is 0 for short completions and falls to -1 as they come near the longest allowed length.

    With L_max = `max_completion_len` and L_cache = `soft_punish_cache`, in tokens: 0 up to L_max - L_cache, then
    (L_max - L_cache - length) / L_cache, and -1 beyond L_max. Source: DAPO, eq. 13 (arXiv:2503.14476).

    Raises: ValueError unless 1 <= `soft_punish_cache` <= `max_completion_len`.

    >>> get_soft_overlong_punishment(10, 4)(completion_ids=[[0] * n for n in (6, 7, 10, 11)])
    [0.0, -0.25, -1.0, -1.0]
    """
    if not 1 <= soft_punish_cache <= max_completion_len:
        raise ValueError(
            f"soft_punish_cache must be between 1 and max_completion_len={max_completion_len}, got {soft_punish_cache}. "
            "It is the number of last tokens over which the punishment grows."
        )

    def soft_overlong_punishment_reward(
        completion_ids: Sequence[Sequence[int]], **kwargs: Any
    ) -> list[float]:
        free = max_completion_len - soft_punish_cache
        excess = (len(ids) - free for ids in completion_ids)
        return [0.0 if over <= 0 else max(-over / soft_punish_cache, -1.0) for over in excess]

    return soft_overlong_punishment_reward
