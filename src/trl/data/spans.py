"""Which tokens of a conversation the assistant wrote: read from template marks, or derived by rendering and proven.

Character ranges come first; a range becomes token positions only where its ends fall between two tokens.
"""

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from trl.data.formats import common_prefix_length
from trl.data.rendering import (
    Chat,
    Message,
    ProcessingClass,
    TemplateRefusal,
    render,
    render_with_marks,
    text_tokenizer,
)
from trl.data.templates import has_generation_marks
from trl.data.tokenization import encode


class AssistantTokens(NamedTuple):
    """A tokenised conversation: `mask` is 1 on the assistant's tokens; the other two count oddities of its turns."""

    input_ids: list[int]
    mask: list[int]
    unstopped: int  # turns whose marked text has no stop token at its end
    shifted: int  # ends of turns that fall inside a token


class StopTokens:
    """The tokens that may close a turn: the tokenizer's eos and its other special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.texts = tuple({*added, *tokenizer.all_special_tokens})
        self.eos = None if tokenizer.eos_token is None else str(tokenizer.eos_token)

    def end_in(self, text: str) -> int | None:
        """Where the special token ends that closes `text`, whitespace behind it aside; None without one."""
        stripped = text.rstrip()
        return len(stripped) if stripped.endswith(self.texts) else None

    def end_of_closer(self, text: str, start: int, openers: tuple[str, ...]) -> int | None:
        """Where the special token ends that stands right at `start` and is none of those that open turns."""
        rest = text[start:]
        closers = [token for token in self.texts if rest.startswith(token) and token not in openers]
        return start + max(map(len, closers)) if closers else None

    def openers(self, generation_prompt: str) -> tuple[str, ...]:
        """The special tokens with which a turn begins, as the prompt for one shows."""
        return tuple(token for token in self.texts if generation_prompt.lstrip().startswith(token))

    def end_of_eos(self, text: str, start: int) -> int | None:
        """Where the eos token ends that begins at `start`, whitespace before it aside; None without one."""
        rest = text[start:].lstrip()
        if self.eos is None or not rest.startswith(self.eos):
            return None
        return len(text) - len(rest) + len(self.eos)


def assistant_tokens(
    processing_class: ProcessingClass, chat: Chat, stop_tokens: StopTokens | None = None
) -> AssistantTokens:
    """Token ids of a conversation and the mask of what the assistant wrote, each turn with its stop token.

    With `{% generation %}` marks in the template the marked text counts, and the stop token that the template writes
    right behind a mark. Without, each turn's text is what its
    rendering adds to the conversation before it with the generation prompt; that these are prefixes of the whole, that
    the ends fall between tokens and that a stop token closes the turn is checked.

    Raises: TemplateRefusal (a ValueError) that names the turn where the derived spans cannot be proven right.
    """
    tokenizer = text_tokenizer(processing_class)
    stop_tokens = stop_tokens or StopTokens(tokenizer)
    if has_generation_marks(processing_class, tools=chat.tools):
        return _marked_tokens(processing_class, chat, stop_tokens)
    text, spans = derive_spans(processing_class, chat, stop_tokens)
    turns = [index for index, message in enumerate(chat.messages) if message.get("role") == "assistant"]
    ids, positions = token_boundaries(tokenizer, text, [end for span in spans for end in span])
    for turn, (start, end) in zip(turns, _pairs(positions), strict=True):
        if start is None or end is None:
            edge = "start" if start is None else "end"
            raise _unproven(
                turn, f"its {edge} falls inside a token (whitespace at the edge of the content does that)"
            )
    return AssistantTokens(ids, _mask(len(ids), _pairs(positions)), unstopped=0, shifted=0)


def _marked_tokens(processing_class: ProcessingClass, chat: Chat, stop_tokens: StopTokens) -> AssistantTokens:
    tokenizer = text_tokenizer(processing_class)
    text, marks = render_with_marks(processing_class, chat)
    spans = _with_closers(processing_class, chat, text, _join_adjacent(marks), stop_tokens)
    cuts = [end for span in spans for end in span]
    ids, positions = token_boundaries(tokenizer, text, cuts)
    unstopped = sum(stop_tokens.end_in(text[start:end]) is None for start, end in spans)
    shifted = sum(position is None for position in positions)
    if shifted:
        # A token that straddles an end is trained: it holds text of the assistant.
        whole = [
            common_prefix_length(encode(tokenizer, [text[:cut]])[0], ids) + index % 2
            if position is None
            else position
            for index, (cut, position) in enumerate(zip(cuts, positions, strict=True))
        ]
        return AssistantTokens(ids, _mask(len(ids), _pairs(whole)), unstopped, shifted)
    return AssistantTokens(ids, _mask(len(ids), _pairs(positions)), unstopped, shifted)


def _with_closers(
    processing_class: ProcessingClass,
    chat: Chat,
    text: str,
    spans: list[tuple[int, int]],
    stop_tokens: StopTokens,
) -> list[tuple[int, int]]:
    """The marked ranges, each reaching through the stop token where the template writes it right behind the mark."""
    if all(stop_tokens.end_in(text[start:end]) is not None for start, end in spans):
        return spans
    try:
        prompted = render(processing_class, chat, add_generation_prompt=True)
    except TemplateRefusal:
        prompted = text
    openers = stop_tokens.openers(prompted[len(text) :] if prompted.startswith(text) else "")
    ends = [
        end
        if stop_tokens.end_in(text[start:end]) is not None
        else stop_tokens.end_of_closer(text, end, openers)
        for start, end in spans
    ]
    return [(start, old if end is None else end) for (start, old), end in zip(spans, ends, strict=True)]


def derive_spans(
    processing_class: ProcessingClass, chat: Chat, stop_tokens: StopTokens
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation and the character range of each assistant turn, from after the generation prompt
    through the stop token; text after the stop token (a line break) is not in it.

    Where the template writes the stop token only in front of the next message, the range reaches up to there, and the
    text of a conversation that ends with the assistant gets the token that a next message would bring.

    Raises: TemplateRefusal naming the turn where a prefix does not render as a prefix, or no stop token is found.
    """
    text = render(processing_class, chat)
    spans = []
    for turn, message in enumerate(chat.messages):
        if message.get("role") != "assistant":
            continue
        start, end = _turn_range(processing_class, chat, turn, text)
        closed = stop_tokens.end_in(text[start:end])
        if closed is not None:
            spans.append((start, start + closed))
            continue
        if turn == len(chat.messages) - 1:
            text = _with_next_stop_token(processing_class, chat, text, stop_tokens)
        stop = stop_tokens.end_of_eos(text, end)
        if stop is None:
            raise _unproven(turn, "no stop token closes it, so the model would not learn to stop")
        spans.append((start, stop))
    return text, spans


def _turn_range(processing_class: ProcessingClass, chat: Chat, turn: int, text: str) -> tuple[int, int]:
    before = chat._replace(messages=chat.messages[:turn])
    through = chat._replace(messages=chat.messages[: turn + 1])
    try:
        closed = render(processing_class, before)
        head = render(processing_class, before, add_generation_prompt=True)
        tail = render(processing_class, through)
    except TemplateRefusal as error:
        raise _unproven(turn, f"what comes before it cannot be rendered alone: {error}") from error
    if not text.startswith(tail):
        raise _unproven(turn, "the template renders it differently once more messages follow")
    if not tail.startswith(head):
        raise _unproven(turn, "the finished conversation does not continue the generation prompt")
    answer, said = chat.messages[turn].get("content"), text[len(head) : len(tail)].lstrip()
    is_shown = isinstance(answer, str) and bool(answer.strip()) and said.startswith(answer.strip())
    if head == closed and not is_shown:
        raise _unproven(turn, "the template has no generation prompt that would show where it starts")
    return len(head), len(tail)


def _with_next_stop_token(
    processing_class: ProcessingClass, chat: Chat, text: str, stop_tokens: StopTokens
) -> str:
    probe: Message = {"role": "user", "content": "Next."}
    try:
        longer = render(processing_class, chat._replace(messages=[*chat.messages, probe]))
    except TemplateRefusal:
        return text
    stop = stop_tokens.end_of_eos(longer, len(text)) if longer.startswith(text) else None
    return text if stop is None else longer[:stop]


def _unproven(turn: int, reason: str) -> TemplateRefusal:
    return TemplateRefusal(
        f"message {turn}: the assistant's tokens cannot be told apart, because {reason}. Add {{% generation %}} marks "
        "to the chat template (trl.chat_template_utils.get_training_chat_template has marked ones), or use "
        "prompt-completion rows."
    )


def token_boundaries(
    tokenizer: PreTrainedTokenizerBase, text: str, cuts: Sequence[int]
) -> tuple[list[int], list[int | None]]:
    """The token ids of a rendered text, and for each character position the number of tokens before it.

    None where no token ends there. `cuts` are in ascending order. A boundary is proven by tokenising: either all
    pieces between the cuts one by one give the tokens of the whole, or the text up to the cut gives a prefix of them.
    No special tokens are added, except that a begin token is kept where the text brings one.
    """
    edges = [0, *cuts, len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    whole, *parts = encode(tokenizer, [text, *pieces])
    if list(chain.from_iterable(parts)) == whole:
        counts: list[int | None] = []
        position = 0
        for part in parts[:-1]:
            position += len(part)
            counts.append(position)
        return whole, counts
    heads = encode(tokenizer, [text[:cut] for cut in cuts])
    return whole, [len(head) if whole[: len(head)] == head else None for head in heads]


def _join_adjacent(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def _pairs(positions: Sequence) -> list[tuple]:
    return list(zip(positions[::2], positions[1::2], strict=True))


def _mask(length: int, spans: Sequence[tuple[int, int]]) -> list[int]:
    mask = [0] * length
    for start, end in spans:
        mask[start:end] = [1] * (end - start)
    return mask
