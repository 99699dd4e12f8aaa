"""Rewards for the form of a completion."""

from __future__ import annotations

import re
from collections.abc import Sequence
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
