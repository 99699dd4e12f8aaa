"""Rows of paired preferences: what their columns are, and where the prompt ends in text and in conversations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from trl.data.formats import common_prefix_length, extract_prompt
from trl.data.rendering import Chat, Message, ProcessingClass, render, render_prompt, split_rendering
from trl.data.tokenization import read_chat, read_text
from trl.data.validation import Place, check_answer, check_tokenizer, wrong_columns

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
        takes = f"'chosen' and 'rejected' (with or without 'prompt'), or tokenized {', '.join(map(repr, known[0]))}"
        needed = known[0] if set(known[0]) & set(columns) else SIDES
        raise wrong_columns(columns, name, takes=takes, needed=needed)
    chosen = first_row.get("chosen")
    kind = "messages" if isinstance(chosen, list | tuple) else "text"
    return PairRowType(kind, SIDES, "prompt" in columns)


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
    is_repeated: bool = False  # whether the answers began with the prompt too; the repetition is removed


class RenderedPair(NamedTuple):
    """Prompt and completion of the chosen and of the rejected side, as text."""

    chosen: tuple[str, str]
    rejected: tuple[str, str]
    is_repeated: bool = False


@dataclass(frozen=True)
class PairReader:
    """Reads prompt and answers of rows of one type, checked.

    `needs_prompt`: whether the prompt is told apart from the answers (reward models score the whole).
    `tools` stand in for those of the rows' own column.
    """

    processing_class: ProcessingClass
    row_type: PairRowType
    dataset_name: str
    needs_prompt: bool = True
    tools: list | None = None

    def place(self, row: int, column: str) -> Place:
        return Place(self.dataset_name, row, column)

    def check(self, dataset: Any) -> None:
        """Check that the tokenizer has what these rows need; see `check_tokenizer`."""
        kind, place = self.row_type.kind, self.place(0, self.row_type.columns[0])
        is_chat, needs_eos = kind == "messages", kind == "text" or (kind == "messages" and self.needs_prompt)
        check_tokenizer(
            dataset, self.processing_class, place, is_chat=is_chat, needs_eos=needs_eos, tools=self.tools
        )

    def read(self, row: dict[str, Any], index: int) -> RenderedPair:
        """Both sides of a row of text or messages; without `needs_prompt` the whole of each is its completion.

        Raises: TypeError or ValueError naming row, column and remedy.
        """
        if self.row_type.kind == "text":
            text = self.text(row, index)
            if self.needs_prompt:
                return RenderedPair((text.prompt, text.chosen), (text.prompt, text.rejected))
            return RenderedPair(("", text.prompt + text.chosen), ("", text.prompt + text.rejected))
        pair = self.chat(row, index)
        if self.needs_prompt:
            with self.place(index, "chosen").named():
                opened = render_prompt(self.processing_class, pair.prompt)
                chosen, rejected = (
                    split_rendering(self.processing_class, pair.prompt, answer, opened)
                    for answer in (pair.chosen, pair.rejected)
                )
            return RenderedPair(chosen, rejected, pair.is_repeated)
        texts = []
        for side in SIDES:
            whole = pair.prompt._replace(messages=[*pair.prompt.messages, *getattr(pair, side)])
            with self.place(index, side).named():
                texts.append(("", render(self.processing_class, whole)))
        return RenderedPair(texts[0], texts[1], pair.is_repeated)

    def text(self, row: dict[str, Any], index: int) -> TextPair:
        """The texts of a row.

        Raises: TypeError or ValueError for what is no text, for an empty answer, and for answers that share no prompt.
        """
        chosen, rejected = (self.text_of(row, index, side) for side in SIDES)
        if self.row_type.has_prompt:
            return TextPair(self.text_of(row, index, "prompt", may_be_empty=True), chosen, rejected)
        if not self.needs_prompt:
            return TextPair("", chosen, rejected)
        split = extract_prompt({"chosen": chosen, "rejected": rejected})
        if not split["prompt"]:
            given = f"{chosen[:20]!r}... and 'rejected' {rejected[:20]!r}... begin differently"
            raise self._unshared(index, given)
        return TextPair(**split)  # type: ignore[arg-type]

    def _unshared(self, index: int, given: str) -> Exception:
        remedy = "Begin them with it, or give it in a column 'prompt'."
        return self.place(index, "chosen").error(given, "both to begin with their prompt", remedy)

    def text_of(self, row: dict[str, Any], index: int, column: str, *, may_be_empty: bool = False) -> str:
        return read_text(self.processing_class, row, self.place(index, column), may_be_empty=may_be_empty)

    def chat(self, row: dict[str, Any], index: int) -> ChatPair:
        """The messages of a row.

        Raises: TypeError or ValueError for what are no messages, for a prompt that does not fit the answers, and for
        answers that do not begin and end with the assistant.
        """
        pair = self._split(row, index)
        for side, messages in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            place, (first, last) = self.place(index, side), (messages[0]["role"], messages[-1]["role"])
            if pair.prompt.messages and first in NOT_ANSWERING:
                remedy = "Put what comes before the assistant's answer into the prompt."
                raise place.error(
                    f"the answer begins with a message of role {first!r}", "the assistant's", remedy
                )
            if last in NOT_ENDING:
                remedy = "Remove what comes after the answer, or filter the row out."
                raise place.error(f"the last message has the role {last!r}", "the assistant's", remedy)
            check_answer(messages, place)
        return pair

    def _split(self, row: dict[str, Any], index: int) -> ChatPair:
        chosen, rejected = (self.chat_of(row, index, side) for side in SIDES)
        prompt = row.get("prompt") if self.row_type.has_prompt else None
        if self.row_type.has_prompt and not isinstance(prompt, str):
            return self._after_prompt(self.chat_of(row, index, "prompt"), chosen, rejected, index)
        shared = _prompt_messages(chosen.messages, rejected.messages)
        if isinstance(prompt, str):
            self._check_repeats(prompt, chosen.messages[:shared], index)
        if not self.needs_prompt:
            return ChatPair(chosen._replace(messages=[]), chosen.messages, rejected.messages)
        if not shared:
            raise self._unshared(
                index, "the first message is not that of 'rejected', or the assistant's only one"
            )
        head = chosen._replace(messages=chosen.messages[:shared])
        return ChatPair(head, chosen.messages[shared:], rejected.messages[shared:])

    def chat_of(self, row: dict[str, Any], index: int, column: str) -> Chat:
        return read_chat(self.processing_class, row, self.place(index, column), tools=self.tools)

    def _after_prompt(self, prompt: Chat, chosen: Chat, rejected: Chat, index: int) -> ChatPair:
        """Answers to a prompt of its own column; where both are whole conversations, without the prompt's messages."""
        length = len(prompt.messages)
        answers = (chosen.messages, rejected.messages)
        if all(len(answer) > length and answer[:length] == prompt.messages for answer in answers):
            return ChatPair(prompt, answers[0][length:], answers[1][length:], is_repeated=True)
        for side, answer in zip(SIDES, answers, strict=True):
            role = answer[0]["role"]
            if role in NOT_ANSWERING:
                given = (
                    f"role {role!r}, as a whole conversation begins, but 'prompt' is not how this one begins"
                )
                remedy = "Give the answer only, or remove the column 'prompt'."
                place = self.place(index, side)._replace(message=0)
                raise place.error(given, "the assistant's answer to 'prompt'", remedy)
        return ChatPair(prompt, *answers)

    def _check_repeats(self, prompt: str, shared: list[Message], index: int) -> None:
        """A prompt of text beside conversations must be one that they begin with."""
        texts = [text for text in map(_text_of, shared) if text]
        if not any(text in prompt or prompt.strip() in text for text in texts):
            given = (
                f"{prompt[:40]!r} is not what the conversations in 'chosen' and 'rejected' both begin with"
            )
            remedy = 'Write it as messages ([{"role": "user", "content": ...}]), or remove the column.'
            raise self.place(index, "prompt").error(given, "their prompt", remedy)


def _text_of(message: Message) -> str:
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
