"""Rows of paired preferences: their columns, where the prompt ends in text and in conversations, and their lengths."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from trl.data.formats import Row, StoredOrStream, common_prefix_length, extract_prompt
from trl.data.rendering import Chat, Message, ProcessingClass, hides_answer, render, render_prompt, split_rendering
from trl.data.tokenization import Ids, read_chat, read_text
from trl.data.validation import Place, RowType, check_answer, check_tokenizer, wrong_columns

TruncationMode = Literal["keep_end", "keep_start"]
TruncationOrder = Literal["sequence", "prompt_first"]

SIDES = ("chosen", "rejected")
PAIR_COLUMNS = ("prompt_input_ids", "chosen_input_ids", "rejected_input_ids")
REWARD_COLUMNS = ("chosen_input_ids", "rejected_input_ids")
OLDER_REWARD_COLUMNS = ("input_ids_chosen", "input_ids_rejected")

NOT_ANSWERING = ("system", "developer", "user")  # roles with which no completion begins or ends
NOT_ENDING = (*NOT_ANSWERING, "tool", "function")


def pair_row_type(columns: Sequence[str], first_row: Row, *, name: str, for_reward: bool = False) -> RowType:
    """The type of rows: tokens, messages or text, in this order. Raises: ValueError for columns of none of these."""
    pairs = (REWARD_COLUMNS, OLDER_REWARD_COLUMNS) if for_reward else (PAIR_COLUMNS,)
    for tokens in pairs:
        if set(tokens) <= set(columns):
            if not for_reward:
                check_no_labels(columns, "chosen_labels", name)
            return RowType("tokens", tokens)
    if not set(SIDES) <= set(columns):
        takes = f"'chosen' and 'rejected' (with or without 'prompt'), or tokenized {', '.join(map(repr, pairs[0]))}"
        needed = pairs[0] if set(pairs[0]) & set(columns) else SIDES
        raise wrong_columns(columns, name, takes=takes, needed=needed)
    return RowType("messages" if isinstance(first_row.get("chosen"), list | tuple) else "text", SIDES)


def check_no_labels(columns: Sequence[str], labels: str, name: str) -> None:
    """Raise ValueError for tokenised rows with `labels`, whose completions begin with their prompts."""
    if labels in columns:
        raise ValueError(
            f"{name} dataset has {labels!r}: tokens as older programs made them, each answer behind its prompt. Give "
            "text, or cut the prompts off and remove the labels."
        )


class Pair(NamedTuple):
    """Prompt (empty where none is needed) and answers of a row: texts, or a `Chat` and lists of messages."""

    prompt: Any
    chosen: Any
    rejected: Any
    is_repeated: bool = False  # whether the answers began with the prompt too; the repetition is removed


@dataclass(frozen=True)
class PairReader:
    """Reads prompt and answers of rows of one type, checked; `tools` stand in for those of the rows' own column.

    `needs_prompt`: whether the prompt is split off the answers (reward models score the whole).
    """

    processing_class: ProcessingClass
    row_type: RowType
    dataset_name: str
    needs_prompt: bool = True
    tools: list | None = None

    def place(self, row: int, column: str) -> Place:
        return Place(self.dataset_name, row, column)

    def check(self, dataset: StoredOrStream) -> None:
        """Check that the tokenizer has what these rows need; see `check_tokenizer`."""
        is_chat, place = self.row_type.is_chat, self.place(0, self.row_type.columns[0])
        needs_eos = self.row_type.kind == "text" or (is_chat and self.needs_prompt)
        check_tokenizer(dataset, self.processing_class, place, is_chat=is_chat, needs_eos=needs_eos, tools=self.tools)

    def read(self, row: Row, index: int) -> tuple[tuple[str, str], tuple[str, str], dict[str, int]]:
        """Prompt and completion of the chosen and of the rejected side, as text; and counts for the report.

        Without `needs_prompt` the whole of each side is its completion. Raises: TypeError or ValueError.
        """
        pair, sides, processing_class = self.pair(row, index), [], self.processing_class
        if not self.row_type.is_chat:
            prompt, head = (pair.prompt, "") if self.needs_prompt else ("", pair.prompt)
            return (prompt, head + pair.chosen), (prompt, head + pair.rejected), {}
        opened, counts = None, {"repeated_prompts": int(pair.is_repeated), "hidden_answers": 0}
        for side in SIDES:
            answer: list[Message] = getattr(pair, side)
            with self.place(index, side).named():
                if self.needs_prompt:
                    opened = opened or render_prompt(processing_class, pair.prompt)
                    sides.append(split_rendering(processing_class, pair.prompt, answer, opened))
                else:
                    whole = pair.prompt._replace(messages=[*pair.prompt.messages, *answer])
                    sides.append(("", render(processing_class, whole)))
            counts["hidden_answers"] |= hides_answer(answer, "".join(sides[-1]))
        return sides[0], sides[1], counts

    def pair(self, row: Row, index: int) -> Pair:
        """Prompt and answers of a row of text or messages. Raises: TypeError or ValueError for other values."""
        if not self.row_type.is_chat:
            return self._texts(row, index)
        pair = self._chats(row, index)
        for side, messages in zip(SIDES, pair[1:3], strict=True):
            place, (first, last) = self.place(index, side), (messages[0]["role"], messages[-1]["role"])
            if pair.prompt.messages and first in NOT_ANSWERING:
                remedy = "Put what comes before the assistant's answer into the prompt."
                raise place.error(f"the answer begins with the role {first!r}", "the assistant's", remedy)
            if last in NOT_ENDING:
                remedy = "Remove what comes after the answer, or filter the row out."
                raise place.error(f"the last message has the role {last!r}", "the assistant's", remedy)
            check_answer(messages, place)
        return pair

    def text_of(self, row: Row, index: int, column: str, *, may_be_empty: bool = False) -> str:
        return read_text(self.processing_class, row, self.place(index, column), may_be_empty=may_be_empty)

    def chat_of(self, row: Row, index: int, column: str) -> Chat:
        return read_chat(self.processing_class, row, self.place(index, column), tools=self.tools)

    def _texts(self, row: Row, index: int) -> Pair:
        chosen, rejected = (self.text_of(row, index, side) for side in SIDES)
        if "prompt" in row:
            return Pair(self.text_of(row, index, "prompt", may_be_empty=True), chosen, rejected)
        if not self.needs_prompt:
            return Pair("", chosen, rejected)
        split = extract_prompt({"chosen": chosen, "rejected": rejected})
        if not split["prompt"]:
            raise self._unshared(index, f"{chosen[:20]!r} and 'rejected' {rejected[:20]!r} begin differently")
        return Pair(split["prompt"], split["chosen"], split["rejected"])

    def _chats(self, row: Row, index: int) -> Pair:
        head, other = (self.chat_of(row, index, side) for side in SIDES)
        chosen, rejected = head.messages, other.messages
        prompt = row.get("prompt", "")
        if not isinstance(prompt, str):
            asked, answers = self.chat_of(row, index, "prompt"), (chosen, rejected)
            length = len(asked.messages)
            if all(len(answer) > length and answer[:length] == asked.messages for answer in answers):
                return Pair(asked, chosen[length:], rejected[length:], is_repeated=True)
            for side, answer in zip(SIDES, answers, strict=True):
                check_role(answer, self.place(index, side))
            return Pair(asked, *answers)
        shared = _prompt_messages(chosen, rejected)
        if "prompt" in row:  # a prompt of text beside conversations must be one that they begin with
            texts = [text for text in map(_text_of, chosen[:shared]) if text]
            if not any(text in prompt or prompt.strip() in text for text in texts):
                fault = f"{prompt[:40]!r} is not what the conversations begin with"
                remedy = 'Write it as messages ([{"role": "user", "content": ...}]), or remove the column.'
                raise self.place(index, "prompt").error(fault, "their prompt", remedy)
        if not self.needs_prompt:
            return Pair(head._replace(messages=[]), chosen, rejected)
        if not shared:
            fault = "the first message is not that of 'rejected', or the assistant's only one"
            raise self._unshared(index, fault)
        return Pair(head._replace(messages=chosen[:shared]), chosen[shared:], rejected[shared:])

    def _unshared(self, index: int, fault: str) -> Exception:
        remedy = "Begin them with it, or give it in a column 'prompt'."
        return self.place(index, "chosen").error(fault, "both to begin with their prompt", remedy)


def check_role(answer: list[Message], place: Place) -> None:
    """Raise ValueError for an answer to a prompt that begins as a whole conversation does."""
    role = answer[0]["role"]
    if role in NOT_ANSWERING:
        fault = f"role {role!r}, as a whole conversation begins"
        remedy = "Give the answer only, and what comes before it in the column 'prompt'."
        raise place._replace(message=0).error(fault, "the assistant's answer to 'prompt'", remedy)


def _text_of(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content)
    return content.strip()


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


class Side(NamedTuple):
    """A completion and the prompt that it is scored behind."""

    prompt: Ids
    completion: Ids


@dataclass(frozen=True)
class PairLengths:
    """Limits of prompts and completions in tokens, None for none, and the order in which they are applied.

    - "sequence" (DPO): prompts keep their last `max_prompt_length` tokens, completions their first
      `max_completion_length`; then each prompt + completion keeps its last ("keep_end") or first ("keep_start")
      `max_length`. Under "keep_end" the prompts of a pair may differ then.
    - "prompt_first" (CPO, ORPO): only where the prompt and the longest completion exceed `max_length`, the prompt
      keeps its last or first `max_prompt_length` tokens, and if that is not enough every completion its first
      `max_length - max_prompt_length`. Without `max_length` prompts are cut wherever they are too long.

    For an encoder-decoder `max_length` does nothing, and a prompt keeps its eos.
    """

    max_length: int | None = None
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    truncation_mode: TruncationMode = "keep_end"
    truncation_order: TruncationOrder = "sequence"
    is_encoder_decoder: bool = False

    def cut(self, prompt: Ids, completions: list[Ids]) -> list[Side]:
        """What is left of each completion and of its prompt; either may be empty.

        Raises: ValueError where `max_prompt_length` leaves nothing of `max_length` for a completion that needs it.

        >>> PairLengths(max_length=4).cut([1, 2, 3], [[4], [5, 6]])
        [Side(prompt=[1, 2, 3], completion=[4]), Side(prompt=[2, 3], completion=[5, 6])]
        """
        limit, keeps_start = self.max_prompt_length, self.truncation_mode == "keep_start"
        last = prompt if limit is None else prompt[-limit:]
        shorter = [completion[: self.max_completion_length] for completion in completions]
        if self.is_encoder_decoder:
            if limit is not None and keeps_start and self.truncation_order == "prompt_first" and last != prompt:
                last = [*prompt[: limit - 1], prompt[-1]]
            return [Side(last, completion) for completion in shorter]
        if self.truncation_order == "sequence":
            return [self._cut_sequence(last, completion) for completion in shorter]
        longest, most = max(map(len, completions)), self.max_length
        if most is None or len(prompt) + longest > most:
            prompt = prompt[:limit] if keeps_start else last
        if most is None or len(prompt) + longest <= most:
            return [Side(prompt, completion) for completion in completions]
        self._check_room()
        room = max(most - (len(prompt) if limit is None else limit), 0)
        return [Side(prompt[:most], completion[:room]) for completion in completions]

    def _cut_sequence(self, prompt: Ids, completion: Ids) -> Side:
        excess = 0 if self.max_length is None else len(prompt) + len(completion) - self.max_length
        if excess <= 0:
            return Side(prompt, completion)
        if self.truncation_mode == "keep_end":
            return Side(prompt[excess:], completion[max(excess - len(prompt), 0) :])
        room = len(completion) - excess
        if room <= 0:
            self._check_room()
        return Side(prompt[: self.max_length], completion[: max(room, 0)])

    def _check_room(self) -> None:
        limit, most = self.max_prompt_length, self.max_length
        if limit is not None and most is not None and limit >= most:
            text = f"max_prompt_length {limit} leaves no token of max_length {most} for a completion"
            raise ValueError(f"{text}. Lower it, or raise max_length.")


def with_context(side: Side) -> Side:
    """A completion of which no prompt is left, with its first token, which nothing predicts, as its prompt.

    >>> with_context(Side([], [7, 8, 9]))
    Side(prompt=[7], completion=[8, 9])
    """
    return side if side.prompt else Side(side.completion[:1], side.completion[1:])
