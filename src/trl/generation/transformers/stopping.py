"""When completions end: stop tokens and strings, and lengths drawn per query."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteria

_MARGIN = 4  # tokens before the longest stop string that are decoded too: a first token may lose its space


class StopStrings:
    """Finds stop strings in what was generated, also across the borders of tokens.

    A stop string counts where its last character came with the newest token; prompts are not searched.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Any, vocabulary: int) -> None:
        if tokenizer is None:
            raise ValueError(
                f"stop_strings {list(texts)} need a tokenizer, got None. Give the engine one, or use "
                "stop_token_ids."
            )
        self.texts, self.tokenizer = tuple(texts), tokenizer
        self.span = max(len(text.encode()) for text in texts) + _MARGIN
        self.may_end = self._may_end(vocabulary)

    def _may_end(self, vocabulary: int) -> Tensor:
        """Bool `(V,)`: whether a token can bring the last character of a stop string; half a one may.

        Any token may bring a space: decoded alone, some tokenizers drop the one before a word.
        """
        if any(text[-1].isspace() for text in self.texts):
            return torch.ones(vocabulary, dtype=torch.bool)
        lasts = {text[-1] for text in self.texts} | {"\ufffd"}
        texts = self.tokenizer.batch_decode(
            [[token] for token in range(vocabulary)], skip_special_tokens=False
        )
        return torch.tensor([not lasts.isdisjoint(text) for text in texts])

    def ended(self, ids: Sequence[int]) -> bool:
        """Whether the newest of a completion's `ids` completed a stop string."""
        tail = list(ids[-self.span :])
        text, before = self._decode(tail), self._decode(tail[:-1])
        return any(
            stop in text and (stop not in before or self._later(stop, text, before)) for stop in self.texts
        )

    def _later(self, stop: str, text: str, before: str) -> bool:
        return text.rfind(stop) + len(stop) > len(before)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class StopRule:
    """Which rows are done after a token: `limits` `(N,)` in tokens per request, `ends` stop tokens `(E,)`."""

    def __init__(self, limits: Tensor, ends: Tensor, strings: StopStrings | None) -> None:
        self.limits, self.ends, self.strings = limits, ends, strings
        self.may_end = None if strings is None else strings.may_end.to(limits.device)

    def done(
        self, ids: Tensor, requests: Tensor, counts: Tensor, generated: Callable[[int, int], list[int]]
    ) -> tuple[Tensor, Tensor]:
        """Bool `(R,)` twice: rows that end, and rows that end because of a stop token or string.

        `ids` are the rows' newest tokens, `counts` their numbers of tokens with them; `generated(request,
        count)` gives all of a request's tokens.
        """
        stopped = torch.isin(ids, self.ends) if len(self.ends) else torch.zeros_like(ids, dtype=torch.bool)
        if self.strings is not None and self.may_end is not None:
            for row in (self.may_end[ids] & ~stopped).nonzero()[:, 0].tolist():
                stopped[row] = self.strings.ended(generated(int(requests[row]), int(counts[row])))
        return stopped | (counts >= self.limits[requests]), stopped


def end_tokens(given: Sequence[int] | None, model: Any) -> list[int]:
    """The stop tokens that were `given`, else the model's own (`generation_config`, then `config`)."""
    if given is not None:
        return list(given)
    for config in (getattr(model, "generation_config", None), model.config):
        own = getattr(config, "eos_token_id", None)
        if own is not None:
            return list(own) if isinstance(own, (list, tuple)) else [int(own)]
    return []


class StringStoppingCriteria(StoppingCriteria):
    """Stops a row of `generate` once its generated text holds one of `stop_strings`; prompts are not searched.

    It can be used for one call of `generate` after another: it starts anew when all rows have stopped, or when
    `first_call` is set to True.
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
    """Draws a number of new tokens, uniform over `min_value, ..., max_value - 1`, by numpy's generator.

    Raises ValueError for an empty range.

    >>> LengthSampler(4, 5)()
    4
    """

    def __init__(self, min_value: int, max_value: int) -> None:
        if not 0 < min_value < max_value:
            raise ValueError(
                f"min_value must be at least 1 and below max_value, got {min_value} and {max_value}. The "
                "largest length drawn is max_value - 1."
            )
        self.min_value, self.max_value = min_value, max_value

    def __call__(self) -> int:
        """One length, in tokens."""
        return int(np.random.randint(self.min_value, self.max_value))
