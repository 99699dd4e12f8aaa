"""What goes into vLLM and comes out of it, in this process and in a server alike."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any


def to_sampling_params(settings: Mapping[str, Any]) -> Any:
    """vLLM's `SamplingParams` of arguments as JSON has them."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    found = dict(settings)
    if isinstance(found.get("structured_outputs"), dict):
        from vllm.sampling_params import StructuredOutputsParams  # pyright: ignore[reportMissingImports]

        found["structured_outputs"] = StructuredOutputsParams(**found["structured_outputs"])
    return SamplingParams(**found)


def drawn(output: Any) -> tuple[list[int], list[float]]:
    """A completion's tokens, and the log-prob of each under the distribution that it was drawn from."""
    ids = list(output.token_ids)
    return ids, [step[token].logprob for token, step in zip(ids, output.logprobs, strict=True)]


def chunk_list(lst: list, n: int) -> list[list]:
    """A list in `n` parts, the first of them one longer where it does not divide.

    >>> chunk_list([1, 2, 3, 4, 5], 2)
    [[1, 2, 3], [4, 5]]
    """
    size, longer = divmod(len(lst), n)
    ends = [part * size + min(part, longer) for part in range(n + 1)]
    return [lst[start:end] for start, end in itertools.pairwise(ends)]


def sanitize_logprob(logprob: Any) -> float | None:
    """The number of a log-prob of vLLM's; None, which JSON has, where it is NaN."""
    return None if math.isnan(logprob.logprob) else logprob.logprob
