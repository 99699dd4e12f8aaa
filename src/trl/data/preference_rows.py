"""Rows of paired preferences: what their columns are, and where the prompt ends in text and in conversations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from transformers import ProcessorMixin

from trl.data.formats import common_prefix_length, extract_prompt
from trl.data.rendering import Chat, Message, ProcessingClass, template_source
from trl.data.tokenization import read_chat
from trl.data.validation import Place, accepted_roles, check_answer, check_text

SIDES = ("chosen", "rejected")
PAIR_COLUMNS = ("prompt_input_ids", "chosen_input_ids", "rejected_input_ids")
REWARD_COLUMNS = ("chosen_input_ids", "rejected_input_ids")
OLDER_REWARD_COLUMNS = ("input_ids_chosen", "input_ids_rejected")

NOT_ANSWERING = ("system", "developer", "user")  # roles with which no completion begins or ends
NOT_ENDING = (*NOT_ANSWERING, "tool", "function")


class PairRowType(NamedTuple):
    """What the rows of a data set of preferences are, as read off its columns and first row."""

    kind: Literal["tokens", "text", "messages"]
    columns: tuple[str, ...]  # those that hold the row's text, messages or tokens
    has_prompt: bool  # whether the prompt stands in a column of its own


def pair_row_type(
    columns: Sequence[str], first_row: Mapping[str, Any], *, name: str, for_reward: bool = False
) -> PairRowType:
    """The type of a data set's rows: tokens, messages or text, in this order.

    Raises: ValueError for columns of none of these, with what to do for data of another type.
    """
    known = (REWARD_COLUMNS, OLDER_REWARD_COLUMNS) if for_reward else (PAIR_COLUMNS,)
    for tokens in known:
        if set(tokens) <= set(columns):
            has_prompt = tokens != OLDER_REWARD_COLUMNS and "prompt_input_ids" in columns
            return PairRowType("tokens", tokens, has_prompt)
    if not set(SIDES) <= set(columns):
        raise ValueError(_wrong_columns(list(columns), known[0], name))
    chosen = first_row.get("chosen")
    kind = "messages" if isinstance(chosen, list | tuple) else "text"
    return PairRowType(kind, SIDES, "prompt" in columns)


def _wrong_columns(columns: list[str], tokens: tuple[str, ...], name: str) -> str:
    start = (
        f"{name} dataset, row 0, has columns {columns}, expected preference pairs: 'chosen' and 'rejected' (with or "
        f"without 'prompt'), or tokenized {', '.join(map(repr, tokens))}"
    )
    if {"completion", "label"} <= set(columns):
        return f"{start}. These rows are unpaired: train with KTOTrainer or BCOTrainer."
    if set(tokens) & set(columns):
        return f"{start}. Add {', '.join(repr(column) for column in tokens if column not in columns)}."
    if {"completion", "messages", "text"} & set(columns):
        return f"{start}. Train on these rows with SFTTrainer, or add the answers to compare."
    missing = [column for column in SIDES if column not in columns]
    return f"{start}. Rename the columns, or add {' and '.join(map(repr, missing))}."


class TextPair(NamedTuple):
    """The texts of a row; a completion that the other one continues is "" (implicit prompts only)."""

    prompt: str
    chosen: str
    rejected: str


class ChatPair(NamedTuple):
    """The messages of a row. `prompt` also holds what the template is given; it is empty where no prompt is needed."""

    prompt: Chat
    chosen: list[Message]
    rejected: list[Message]
    is_repeated: bool = False  # whether the answers began with the prompt too; the repetition is off

    def conversations(self) -> tuple[tuple[str, list[Message]], ...]:
        """The whole conversation of each side, by its name."""
        head = self.prompt.messages
        return ("chosen", [*head, *self.chosen]), ("rejected", [*head, *self.rejected])


@dataclass(frozen=True)
class PairReader:
    """Reads prompt and answers off rows of one type, checked.

    `needs_prompt`: whether the prompt of an implicit row has to be told apart (reward models score the whole).
    `tools` stand in for those of the rows' own column.
    """

    processing_class: ProcessingClass
    row_type: PairRowType
    dataset_name: str
    needs_prompt: bool = True
    tools: list | None = None

    def place(self, row: int, column: str) -> Place:
        return Place(self.dataset_name, row, column)

    def text(self, row: dict[str, Any], index: int) -> TextPair:
        """The texts of a row.

        Raises: TypeError or ValueError for what is no text, for an empty answer, and for answers that share no prompt.
        """
        chosen, rejected = (self._text(row, index, side) for side in SIDES)
        if self.row_type.has_prompt:
            return TextPair(self._text(row, index, "prompt", may_be_empty=True), chosen, rejected)
        if not self.needs_prompt:
            return TextPair("", chosen, rejected)
        split = extract_prompt({"chosen": chosen, "rejected": rejected})
        if not split["prompt"]:
            raise ValueError(
                f"{self.place(index, 'chosen')}: {chosen[:20]!r}... and 'rejected' {rejected[:20]!r}... begin differently, "
                "expected both to begin with their prompt. Begin them with it, or give it in a column 'prompt'."
            )
        return TextPair(**split)  # type: ignore[arg-type]

    def _text(self, row: dict[str, Any], index: int, column: str, *, may_be_empty: bool = False) -> str:
        text = check_text(row.get(column), self.place(index, column), may_be_empty=may_be_empty)
        image = getattr(self.processing_class, "image_token", None)
        if image and str(image) in text and isinstance(self.processing_class, ProcessorMixin):
            raise ValueError(
                f"{self.place(index, column)}: the text holds the placeholder {str(image)!r}, but the rows have no images. "
                "Give them in a column 'images' or 'image', or remove it."
            )
        return text

    def chat(self, row: dict[str, Any], index: int) -> ChatPair:
        """The messages of a row.

        Raises: TypeError or ValueError for what are no messages, for a prompt that the answers do not go with, and for
        answers that do not begin and end with the assistant.
        """
        pair = self._split(row, index)
        for side, messages in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            self._check_roles(messages, self.place(index, side), is_answer=bool(pair.prompt.messages))
        return pair

    def _split(self, row: dict[str, Any], index: int) -> ChatPair:
        chosen, rejected = (self._chat(row, index, side) for side in SIDES)
        prompt = row.get("prompt") if self.row_type.has_prompt else None
        if self.row_type.has_prompt and not isinstance(prompt, str):
            return self._after_prompt(self._chat(row, index, "prompt"), chosen, rejected, index)
        shared = _prompt_messages(chosen.messages, rejected.messages)
        if isinstance(prompt, str):
            self._check_repeats(prompt, chosen.messages[:shared], index)
        if not self.needs_prompt:
            return ChatPair(chosen._replace(messages=[]), chosen.messages, rejected.messages)
        if not shared:
            raise ValueError(
                f"{self.place(index, 'chosen')}: the first message is not that of 'rejected', or the assistant's only one; "
                "expected both to begin with their prompt. Begin them with it, or give it in a column 'prompt'."
            )
        head = chosen._replace(messages=chosen.messages[:shared])
        return ChatPair(head, chosen.messages[shared:], rejected.messages[shared:])

    def _chat(self, row: dict[str, Any], index: int, column: str) -> Chat:
        roles = accepted_roles(template_source(self.processing_class))
        return read_chat(self.processing_class, row, self.place(index, column), roles=roles, tools=self.tools)

    def _after_prompt(self, prompt: Chat, chosen: Chat, rejected: Chat, index: int) -> ChatPair:
        """Answers to a prompt of its own column; where both are whole conversations, without the prompt's messages."""
        length = len(prompt.messages)
        answers = (chosen.messages, rejected.messages)
        if all(len(answer) > length and answer[:length] == prompt.messages for answer in answers):
            return ChatPair(prompt, answers[0][length:], answers[1][length:], is_repeated=True)
        for side, answer in zip(SIDES, answers, strict=True):
            role = answer[0]["role"]
            if role in NOT_ANSWERING:
                raise ValueError(
                    f"{self.place(index, side)}, message 0: role {role!r}, as a whole conversation begins, but 'prompt' is not "
                    "how this one begins; expected the assistant's answer to 'prompt'. Give the answer only, or remove "
                    "the column 'prompt'."
                )
        return ChatPair(prompt, *answers)

    def _check_repeats(self, prompt: str, shared: list[Message], index: int) -> None:
        """A prompt of text beside conversations must be one that they begin with."""
        told = [text for text in map(_spoken, shared) if text]
        if not any(text in prompt or prompt.strip() in text for text in told):
            raise ValueError(
                f"{self.place(index, 'prompt')}: {prompt[:40]!r} is not what the conversations in 'chosen' and 'rejected' both "
                'begin with, expected their prompt. Write it as messages ([{"role": "user", "content": ...}]), or remove '
                "the column."
            )

    def _check_roles(self, messages: list[Message], place: Place, *, is_answer: bool) -> None:
        first, last = messages[0]["role"], messages[-1]["role"]
        if is_answer and first in NOT_ANSWERING:
            raise ValueError(
                f"{place}: the answer begins with a message of role {first!r}, expected the assistant's. Let both answers "
                "begin with the assistant, and put what comes before into the prompt."
            )
        if last in NOT_ENDING:
            raise ValueError(
                f"{place}: the last message has the role {last!r}, expected the assistant's. Remove what comes after the "
                "answer, or filter the row out."
            )
        check_answer(messages, place)


def _spoken(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content)
    return (content or "").strip()


def _prompt_messages(chosen: list[Message], rejected: list[Message]) -> int:
    """How many leading messages are the prompt: all that both share, but so that the assistant still has to answer.

    >>> ask, say = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
    >>> _prompt_messages([ask, say], [ask, say, ask, say])
    1
    """
    shared = common_prefix_length(chosen, rejected)
    if shared < min(len(chosen), len(rejected)):
        return shared
    turns = [index for index in range(shared) if chosen[index]["role"] == "assistant"]
    return turns[-1] if turns else 0
