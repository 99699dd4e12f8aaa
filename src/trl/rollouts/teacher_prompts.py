"""Prompts that a teacher is shown in place of the student's."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trl.data.formats import maybe_convert_to_chatml
from trl.data.prompts import PROMPT_IDS, PromptPreparation, PromptTokenizer
from trl.data.rendering import ProcessingClass
from trl.rewards.result import Text
from trl.rollouts.experience import Experience
from trl.rollouts.maker import Rows
from trl.tensors.ragged import Ragged


@dataclass(frozen=True)
class TeacherPrompts:
    """Tokenises the prompts that teachers are shown; long ones lose their beginning."""

    processing_class: ProcessingClass
    settings: PromptPreparation
    context_length: int | None

    def tokens(self, rows: Rows, shown: Sequence[Any]) -> list[list[int]]:
        """The tokens of the prompts `shown` in place of those of the rows."""
        columns = {**{name: rows[name] for name in rows if name != PROMPT_IDS}, "prompt": shown}
        prompts = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        kind = self.processing_class, self.settings, "train", False, not isinstance(shown[0], str)
        return [row[PROMPT_IDS] for row in PromptTokenizer(*kind).rows(prompts, range(len(prompts)))]

    def with_prompts(self, experience: Experience, tokens: Sequence[Sequence[int]]) -> Experience:
        """The completions with the teacher's prompts, each cut to what the context has room for."""
        if (length := self.context_length) is not None:
            sizes = experience.completions.lengths.tolist()
            tokens = [row[-(length - size) :] for row, size in zip(tokens, sizes, strict=True)]
        return experience.with_more(teacher_prompts=Ragged.of(tokens))


def filled(template: str, **values: str) -> str:
    """A template with its placeholders replaced; those in the values stay.

    >>> filled("{prompt} ({note})", prompt="{note}?", note="yes")
    '{note}? (yes)'
    """
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), template)


def with_roles(prompt: Text) -> Any:
    """Messages with `role` and `content`, also those with `from` and `value`; other values as they are."""
    example: dict[str, Any] = {"prompt": prompt}
    return maybe_convert_to_chatml(example)["prompt"]


def text_of(context: Text) -> str:
    """A privileged context, text or messages, as text."""
    if isinstance(context, str):
        return context
    return "\n".join(str(message["content"]) for message in with_roles(context))


def extended(template: str, prompt: Text, **values: str) -> Text:
    """A prompt in a filled template; in a conversation its last message."""
    if isinstance(prompt, str):
        return filled(template, prompt=prompt, **values)
    *earlier, last = with_roles(prompt)
    return [*earlier, {**last, "content": extended(template, last["content"], **values)}]
