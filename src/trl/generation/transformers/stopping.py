"""Stop tokens, stop strings, and random lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteria

_MARGIN = 4  # more tokens than the longest stop string needs: decoded first, a token may lose its space


class StopStrings:
    """Finds stop strings in completions, also across token borders.

    A stop string counts if its last character came with the newest token; prompts are not searched.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Any, vocabulary: int) -> None:
        if tokenizer is None:
            raise ValueError(
                f"stop_strings {list(texts)} need a tokenizer, got None. Pass one, or use stop_token_ids."
            )
        self.texts, self.tokenizer = tuple(texts), tokenizer
        self.span = max(len(text.encode()) for text in texts) + _MARGIN
        self.may_end = self._may_end(vocabulary)

    def _may_end(self, vocabulary: int) -> Tensor:
        """Bool `(V,)`: tokens that may complete a stop string, also with a part of a character."""
        if any(text[-1].isspace() for text in self.texts):
            return torch.ones(vocabulary, dtype=torch.bool)  # tokens decoded alone may lose a space
        lasts = {text[-1] for text in self.texts} | {"\ufffd"}
        tokens = [[token] for token in range(vocabulary)]
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=False)
        return torch.tensor([not lasts.isdisjoint(text) for text in texts])

    def ended(self, ids: Sequence[int]) -> bool:
        """Whether the newest of a completion's `ids` completed a stop string."""
        tail = list(ids[-self.span :])
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        text, before = (self.tokenizer.decode(part, **options) for part in (tail, tail[:-1]))
        return any(
            stop in text and (stop not in before or text.rfind(stop) + len(stop) > len(before))
            for stop in self.texts
        )


class StopRule:
    """Which requests end with a token: `limits` `(N,)` in tokens, stop tokens `ends` `(E,)`, stop strings."""

    def __init__(self, limits: Tensor, ends: Tensor, strings: StopStrings | None) -> None:
        self.limits, self.ends, self.strings = limits, ends, strings
        self.may_end = None if strings is None else strings.may_end.to(limits.device)

    def done(self, ids: Tensor, requests: Tensor, counts: Tensor, generated: Tensor) -> tuple[Tensor, Tensor]:
        """Bool `(R,)` twice: requests that end, and those that end by a stop token or string.

        `ids` are the newest tokens, `counts` the numbers of tokens with them, `generated` `(N, T)` the tokens of all requests.
        """
        stopped = torch.isin(ids, self.ends) if len(self.ends) else torch.zeros_like(ids, dtype=torch.bool)
        if self.strings is not None and self.may_end is not None:
            for row in (self.may_end[ids] & ~stopped).nonzero()[:, 0].tolist():
                stopped[row] = self.strings.ended(generated[requests[row], : int(counts[row])].tolist())
        return stopped | (counts >= self.limits[requests]), stopped


def end_tokens(given: Sequence[int] | None, model: Any) -> list[int]:
    """The `given` stop tokens, else the model's own (of `generation_config`, then `config`)."""
    if given is not None:
        return list(given)
    for config in (getattr(model, "generation_config", None), model.config):
        own = getattr(config, "eos_token_id", None)
        if own is not None:
            return list(own) if isinstance(own, (list, tuple)) else [int(own)]
    return []


class StringStoppingCriteria(StoppingCriteria):
    """Stops a row of `generate` once its generated text contains one of `stop_strings`; prompts are not searched.

    It can be reused for several calls: it resets when all rows have stopped, or when `first_call` is set to True.
    """

    def __init__(self, stop_strings: Sequence[str], tokenizer: Any) -> None:
        self.stop_strings, self.tokenizer = stop_strings, tokenizer
        self.first_call = True
        self._prompt_length = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Bool `(B,)`: rows that are done."""
        if self.first_call:
            self._prompt_length, self.first_call = input_ids.shape[-1] - 1, False
        texts = self.tokenizer.batch_decode(input_ids[:, self._prompt_length :])
        done = [any(stop in text for stop in self.stop_strings) for text in texts]
        self.first_call = all(done)
        return torch.tensor(done, device=input_ids.device)


class LengthSampler:
    """Draws a number of new tokens from `min_value, ..., max_value - 1` with numpy's generator.

    Raises: ValueError for an empty range.

    >>> LengthSampler(4, 5)()
    4
    """

    def __init__(self, min_value: int, max_value: int) -> None:
        if not 0 < min_value < max_value:
            raise ValueError(
                f"min_value must be at least 1 and less than max_value, got {min_value} and {max_value}."
            )
        self.min_value, self.max_value = min_value, max_value

    def __call__(self) -> int:
        """One length, in tokens."""
        return int(np.random.randint(self.min_value, self.max_value))
