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
        lasts = {text[-1] for text in texts} | {"\ufffd"}  # the latter for a part of a character
        found = tokenizer.batch_decode([[token] for token in range(vocabulary)], skip_special_tokens=False)
        loses_spaces = any(text[-1].isspace() for text in texts)  # tokens decoded alone may
        # Bool `(V,)`: tokens that may complete a stop string.
        self.may_end = torch.tensor([loses_spaces or not lasts.isdisjoint(text) for text in found])

    def ended(self, ids: Sequence[int]) -> bool:
        """Whether the newest of a completion's `ids` completed a stop string."""
        tail = list(ids[-self.span :])
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        text, before = (self.tokenizer.decode(part, **options) for part in (tail, tail[:-1]))
        return any(
            stop in text and (stop not in before or text.rfind(stop) + len(stop) > len(before))
            for stop in self.texts
        )


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
