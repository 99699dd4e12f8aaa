"""A dialogue of a model and an environment as one text and one sequence of tokens, in segments by author."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

PROMPT_STYLE, SYSTEM_STYLE = "black on grey85", "black on cyan3"
MODEL_STYLE, REWARD_STYLE = "black on deep_sky_blue1", "black on plum1"


class TextHistory:
    """Segments of the model or the system (prompt, tools), one after another.

    `text` and `tokens` `(T,)` are those of all segments; `text_spans` and `token_spans` their (begin, end), `system_spans` whether
    the system wrote them. `token_masks` `(T,)` is 1 for the model's tokens. `completed`, `truncated` and `reward` are set at the end.
    """

    def __init__(self, text: str, tokens: Tensor | Sequence[int], system: bool = True) -> None:
        self.text = ""
        self.tokens = torch.empty(0, dtype=torch.int64)
        self.token_masks = torch.empty(0, dtype=torch.int64)
        self.system_spans: list[bool] = []
        self.text_spans: list[tuple[int, int]] = []
        self.token_spans: list[tuple[int, int]] = []
        self.completed = self.truncated = False
        self.reward: Any = None
        self.append_segment(text, tokens, system=system)

    def append_segment(self, text: str, tokens: Tensor | Sequence[int], system: bool = True) -> None:
        """Add a segment; a `system` one is not trained on.

        Raises: ValueError without tokens, or where the history has ended.
        """
        tokens = torch.as_tensor(tokens, dtype=torch.int64).flatten().cpu()
        if len(tokens) == 0:
            raise ValueError(f"a segment needs at least one token, got none with the text {text!r}.")
        if self.completed:
            raise ValueError("the history is completed, so nothing can be added.")
        self.text_spans.append((len(self.text), len(self.text) + len(text)))
        self.token_spans.append((len(self.tokens), len(self.tokens) + len(tokens)))
        self.system_spans.append(system)
        self.text += text
        self.tokens = torch.cat([self.tokens, tokens])
        self.token_masks = torch.cat([self.token_masks, torch.full_like(tokens, 0 if system else 1)])

    def complete(self, truncated: bool = False) -> None:
        """Mark the history as ended, by a limit where `truncated`."""
        self.completed, self.truncated = True, truncated

    @property
    def last_text_segment(self) -> str:
        """The text of the newest segment, whoever wrote it."""
        return self.text[slice(*self.text_spans[-1])]

    @property
    def last_model_text(self) -> str:
        """The text of the newest segment that the model wrote; empty where it wrote none."""
        own = [span for span, system in zip(self.text_spans, self.system_spans, strict=True) if not system]
        return self.text[slice(*own[-1])] if own else ""

    def split_query_response_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens of the first segment, tokens behind it, and their mask: 1 on the model's tokens."""
        border = self.token_spans[0][1]
        return self.tokens[:border], self.tokens[border:], self.token_masks[border:]

    # ---- on the screen

    def show_text(self, show_legend: bool = False) -> None:
        """Print the text, coloured by who wrote it, and the reward."""
        shown = Text()
        for (begin, end), style in zip(self.text_spans, self._styles(), strict=True):
            shown.append(self.text[begin:end], style)
        self._print(shown, show_legend)

    def show_tokens(self, tokenizer: Any, show_legend: bool = False) -> None:
        """Print the tokens one by one, coloured by who wrote them, and the reward."""
        shown = Text()
        for (begin, end), style in zip(self.token_spans, self._styles(), strict=True):
            for token in self.tokens[begin:end].tolist():
                shown.append(tokenizer.convert_ids_to_tokens(token), style)
                shown.append(" ")
        self._print(shown, show_legend)

    def show_colour_legend(self) -> None:
        """Print what the colours mean."""
        legend = Text("Prompt", PROMPT_STYLE) + Text("|") + Text("System", SYSTEM_STYLE)
        _console().print(
            legend + Text("|") + Text("Model", MODEL_STYLE) + Text("|") + Text("Reward", REWARD_STYLE)
        )

    def _styles(self) -> Iterator[str]:
        for index, system in enumerate(self.system_spans):
            yield (PROMPT_STYLE if index == 0 else SYSTEM_STYLE) if system else MODEL_STYLE

    def _print(self, shown: Text, show_legend: bool) -> None:
        if self.reward is not None:
            shown.append(f"\n\nReward: {float(self.reward):.4g}", REWARD_STYLE)
        _console().print(shown)
        if show_legend:
            self.show_colour_legend()


def _console() -> Console:
    return Console(highlight=False, markup=False, emoji=False)
