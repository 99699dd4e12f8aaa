"""Which tokens of a conversation the assistant wrote: read from template marks, or derived by rendering and proven.

Character ranges come first; a range becomes token positions only where its ends fall between two tokens.
"""

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
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
from trl.data.tokenization import encode, special_texts

Span = tuple[int, int]


class AssistantTokens(NamedTuple):
    """A tokenised conversation: `mask` is 1 on the assistant's tokens; the other two count oddities of its turns."""

    input_ids: list[int]
    mask: list[int]
    unstopped: int  # turns whose marked text has no stop token at its end
    shifted: int  # ends of turns that fall inside a token


class StopTokens:
    """The tokens that may close a turn: the tokenizer's eos and its other special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.texts = special_texts(tokenizer)
        self.eos = None if tokenizer.eos_token is None else str(tokenizer.eos_token)

    def end_in(self, text: str) -> int | None:
        """Where the special token ends that closes `text`, whitespace behind it aside; None without one."""
        stripped = text.rstrip()
        return len(stripped) if stripped.endswith(self.texts) else None

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

    With `{% generation %}` marks in the template the marked text counts, and the stop token right behind a mark.
    Without, each turn's text is what its rendering adds to the conversation before it with the generation prompt; that
    these are prefixes of the whole, that the ends fall between tokens and that a stop token closes the turn is checked.
    Raises: TemplateRefusal (a ValueError) that names the turn where the derived spans cannot be proven right.
    """
    tokenizer = text_tokenizer(processing_class)
    stop_tokens = stop_tokens or StopTokens(tokenizer)
    is_marked = has_generation_marks(processing_class, tools=chat.tools)
    find_spans = _marked_spans if is_marked else _derived_spans
    text, spans = find_spans(processing_class, chat, stop_tokens)
    cuts = [end for span in spans for end in span]
    ids, positions = token_boundaries(tokenizer, text, cuts)
    edges = []
    for index, (cut, position) in enumerate(zip(cuts, positions, strict=True)):
        if position is None and not is_marked:
            turns = [turn for turn, message in enumerate(chat.messages) if message.get("role") == "assistant"]
            reason = f"its {('start', 'end')[index % 2]} falls inside a token (whitespace at the edge of the content"
            raise _unproven(turns[index // 2], f"{reason} does that)")
        if position is None:  # a token that straddles an end is trained: it holds text of the assistant
            position = common_prefix_length(encode(tokenizer, [text[:cut]])[0], ids) + index % 2
        edges.append(position)
    mask = [0] * len(ids)
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        mask[start:end] = [1] * (end - start)
    unstopped = sum(stop_tokens.end_in(text[start:end]) is None for start, end in spans)
    return AssistantTokens(ids, mask, unstopped, shifted=positions.count(None))


def _marked_spans(processing_class: ProcessingClass, chat: Chat, stop_tokens: StopTokens) -> tuple[str, list[Span]]:
    """The text of a conversation and the marked ranges, each through the stop token right behind the mark."""
    text, marks = render_with_marks(processing_class, chat)
    spans: list[Span] = []
    for start, end in marks:
        if spans and spans[-1][1] == start:  # adjacent marks are one range
            start = spans.pop()[0]
        spans.append((start, end))
    if all(stop_tokens.end_in(text[start:end]) is not None for start, end in spans):
        return text, spans
    try:
        prompted = render(processing_class, chat, add_generation_prompt=True)
    except TemplateRefusal:
        prompted = text
    opening = prompted[len(text) :].lstrip() if prompted.startswith(text) else ""
    closers = [token for token in stop_tokens.texts if not opening.startswith(token)]  # those that open no turn
    for index, (start, end) in enumerate(spans):
        behind = [len(token) for token in closers if text.startswith(token, end)]
        if behind and stop_tokens.end_in(text[start:end]) is None:
            spans[index] = (start, end + max(behind))
    return text, spans


def _derived_spans(processing_class: ProcessingClass, chat: Chat, stop_tokens: StopTokens) -> tuple[str, list[Span]]:
    """The text of a conversation and the range of each assistant turn, from generation prompt through stop token.

    Where the template writes the stop token only in front of the next message, the range reaches up to there, and the
    text of a conversation that ends with the assistant gets the token that a next message would bring.
    """
    text = render(processing_class, chat)
    spans = []
    for turn, message in enumerate(chat.messages):
        if message.get("role") != "assistant":
            continue
        start, end = _turn_range(processing_class, chat, turn, text)
        closed = stop_tokens.end_in(text[start:end])
        if closed is None and turn == len(chat.messages) - 1:
            text = _with_next_stop_token(processing_class, chat, text, stop_tokens)
        stop = stop_tokens.end_of_eos(text, end) if closed is None else start + closed
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


def _with_next_stop_token(processing_class: ProcessingClass, chat: Chat, text: str, stop_tokens: StopTokens) -> str:
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
        "to the chat template (get_training_chat_template), or use prompt-completion rows."
    )


def token_boundaries(
    tokenizer: PreTrainedTokenizerBase, text: str, cuts: Sequence[int]
) -> tuple[list[int], list[int | None]]:
    """The token ids of a rendered text, and the number of tokens before each position in `cuts` (ascending).

    None where no token ends there. A boundary is proven by tokenising: either all pieces between the cuts one by one
    give the tokens of the whole, or the text up to the cut gives a prefix of them. No special tokens are added.
    """
    edges = [0, *cuts, len(text)]
    whole, *parts = encode(tokenizer, [text, *(text[start:end] for start, end in pairwise(edges))])
    if list(chain.from_iterable(parts)) == whole:
        return whole, list(accumulate(map(len, parts[:-1])))
    heads = encode(tokenizer, [text[:cut] for cut in cuts])
    return whole, [len(head) if whole[: len(head)] == head else None for head in heads]
