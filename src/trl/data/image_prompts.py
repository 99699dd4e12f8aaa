"""Prompts with images: their text with a placeholder for each image, up to where a policy continues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset

from trl.data.formats import is_list_of_dicts_with, maybe_convert_to_chatml
from trl.data.image_rows import ImageRows, TextHalves, check_every_row, first_texts, image_column
from trl.data.prompts import PROMPT_IDS
from trl.data.rendering import Chat, Message, render_prompt, text_tokenizer
from trl.data.tokenization import single_begin
from trl.data.validation import Place, SFTRowType


@dataclass(frozen=True)
class ImagePrompts(ImageRows):
    """Renders prompts of one type; `template_kwargs` are for the chat template, those of a row go before them."""

    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def halves(self, row: Mapping[str, Any], index: int, images: list[Any]) -> TextHalves:
        """The text of a prompt, ready for the processor, with a placeholder for each image.

        Raises: ValueError or TypeError naming row and column.
        """
        if not self.row_type.is_conversational:
            return self.texts(row, index, images)
        messages, _ = self.conversation(row, index, images)
        place, chat = self.place(index, "prompt"), self._chat(row, index, messages)
        with place.named():
            text = render_prompt(self.processor, chat)
        return self._counted(TextHalves(text, ""), images, place)

    def text(self, row: Mapping[str, Any], index: int, images: list[Any]) -> str:
        """The same as one text."""
        return "".join(self.halves(row, index, images))

    @property
    def adds_special(self) -> bool:
        """Whether the tokenizer adds its special tokens: a chat template has written them already."""
        return not self.row_type.is_conversational

    def own_tokens(self, ids: list[int], text: str) -> slice:
        """Which of a text's tokens are the prompt: one begin token, and no end token that the tokenizer added."""
        tokenizer: Any = text_tokenizer(self.processor)
        _, doubled = single_begin(tokenizer, ids)
        is_closed = bool(ids) and ids[-1] == tokenizer.eos_token_id
        return slice(doubled, len(ids) - (is_closed and not text.endswith(str(tokenizer.eos_token))))

    def _chat(self, row: Mapping[str, Any], index: int, messages: list[Message]) -> Chat:
        chat = super()._chat(row, index, messages)
        return chat._replace(template_kwargs={**self.template_kwargs, **chat.template_kwargs})


def check_image_prompts(
    dataset: Dataset, processor: Any, *, name: str, template_kwargs: Mapping[str, Any] | None = None
) -> ImagePrompts:
    """How the prompts of a data set are rendered, after a look at all of its rows.

    A row has a `prompt`, text with a placeholder for each image or messages, and `images` (a list) or `image`, or neither.

    Raises: ValueError, TypeError or FileNotFoundError naming row, column and remedy.
    """
    columns = dataset.column_names
    column = image_column(columns)
    if PROMPT_IDS in columns:
        raise ValueError(
            f"{name} dataset, row 0, column {PROMPT_IDS!r}: tokens beside images, expected a 'prompt' of text or messages. "
            "Remove the column: the processor makes the tokens together with the images."
        )
    if "prompt" not in columns:
        raise ValueError(
            f"{name} dataset has columns {columns}, expected 'prompt' (text or messages) beside the images. Rename the column "
            "that holds the prompts."
        )
    first = maybe_convert_to_chatml(dict(first_texts(dataset, column, name=name)))
    is_chat = is_list_of_dicts_with(first.get("prompt"), "role")
    row_type = SFTRowType("prompt_completion", ("prompt",), is_chat)
    prompts = ImagePrompts(
        processor, row_type, column, lambda row, of: Place(name, row, of), dict(template_kwargs or {})
    )
    check_every_row(dataset, prompts.check, column, name=name)
    return prompts
