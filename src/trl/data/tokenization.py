"""Texts and conversations of rows -> token ids, and the boundary between prompt and completion."""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from trl.data.formats import (
    Row,
    RowDict,
    common_prefix_length,
    maybe_convert_to_chatml,
    prepare_multimodal_messages,
    remove_none_values,
    written,
)
from trl.data.rendering import Chat, ProcessingClass, read_tools, template_source, text_tokenizer
from trl.data.validation import Place, check_messages, check_text
from trl.options.spelling import did_you_mean

Ids = list[int]


def with_eos(processing_class: ProcessingClass, eos_token: str | None) -> ProcessingClass:
    """The processing class, or a copy with this eos token. Raises: ValueError for a token outside the vocabulary."""
    if eos_token is None or text_tokenizer(processing_class).eos_token == eos_token:
        return processing_class
    vocabulary = text_tokenizer(processing_class).get_vocab()
    if eos_token not in vocabulary:
        remedy = f"Add it with tokenizer.add_special_tokens first.{did_you_mean(eos_token, vocabulary)}"
        raise ValueError(f"eos_token {eos_token!r} is not in the vocabulary. {remedy}")
    changed = copy.deepcopy(processing_class)
    text_tokenizer(changed).eos_token = eos_token
    return changed


def read_text(processing_class: ProcessingClass, row: Row, place: Place, *, may_be_empty: bool = False) -> str:
    """The text in the column at `place`, checked; without a placeholder for images."""
    text = check_text(row.get(place.column), place, may_be_empty=may_be_empty)
    image = getattr(processing_class, "image_token", None)
    if image and str(image) in text and isinstance(processing_class, ProcessorMixin):
        raise ValueError(f"{place}: the text holds {str(image)!r}, but there is no column 'images'.")
    return text


def read_chat(
    processing_class: ProcessingClass, row: Row, place: Place, *, tools: Sequence[dict | Callable] | None = None
) -> Chat:
    """The messages in the column at `place`, checked, with the row's template variables, and `tools` or the row's own.

    Raises: TypeError or ValueError naming the place where messages, tools or template variables are not readable.
    """
    template = template_source(processing_class)
    messages = check_messages(maybe_convert_to_chatml(dict(row)).get(place.column), place, template=template)
    if isinstance(processing_class, ProcessorMixin):
        with place.named():
            messages = prepare_multimodal_messages(messages, images=[])
        kinds = {part["type"] for message in messages for part in message["content"]} - {"text"}
        if kinds:
            remedy = 'Put images into a column \'images\', and {"type": "image"} in their places, or remove the parts.'
            raise place.error(f"parts of the types {sorted(kinds)} without a column 'images'", "text", remedy)
    return Chat(messages, *template_inputs(row, place, tools=tools))


def template_inputs(
    row: Row, place: Place, *, tools: Sequence[dict | Callable] | None = None
) -> tuple[list[dict | Callable] | None, RowDict]:
    """The tools of a row, and its variables for the chat template."""
    row_tools = row.get("tools") if tools is None else written(tools)
    if row_tools is not None:
        with place._replace(column="tools").named():
            row_tools = read_tools(row_tools)
    kwargs = row.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict):
        place, remedy = place._replace(column="chat_template_kwargs"), "Give one dict for each row."
        raise place.error(f"a {type(kwargs).__name__}", "a dict of template variables", remedy, TypeError)
    return row_tools, remove_none_values(kwargs)


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Ids]:
    """Token ids of texts that bring their own special tokens: none are added."""
    return tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []  # type: ignore[return-value]


def encode_open(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool = True
) -> list[tuple[Ids, int]]:
    """Token ids of texts that something follows, without an end token; the begin tokens removed (`single_begin`)."""
    encoded = tokenizer(list(texts), add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    opened = [single_begin(tokenizer, ids) for ids in encoded]  # type: ignore[union-attr]
    eos, eos_text = tokenizer.eos_token_id, str(tokenizer.eos_token)
    return [
        (ids[:-1] if ids and ids[-1] == eos and not text.endswith(eos_text) else ids, removed)
        for text, (ids, removed) in zip(texts, opened, strict=True)
    ]


def encode_closed(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool = True, is_chat: bool = False
) -> list[tuple[Ids, int]]:
    """Token ids of texts that end here, each `closed`, and how many begin tokens were removed."""
    opened = encode_open(tokenizer, texts, add_special_tokens=add_special_tokens)
    ended = closed([ids for ids, _ in opened], texts, tokenizer, is_chat=is_chat)
    return [(ids, removed) for ids, (_, removed) in zip(ended, opened, strict=True)]


def closed(
    rows: Sequence[Ids], texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, is_chat: bool = False
) -> list[Ids]:
    """The ids of texts with an eos token at the end, unless the text has it, or is a chat that a special token ends."""
    eos: int = tokenizer.eos_token_id  # type: ignore[assignment]
    # Read once: a tokenizer makes its table of them anew, about a millisecond for a thousand tokens.
    stops = special_texts(tokenizer) if is_chat else (str(tokenizer.eos_token),)
    return [
        ids if ids[-1:] == [eos] or text.rstrip().endswith(stops) else [*ids, eos]
        for ids, text in zip(rows, texts, strict=True)
    ]


def special_texts(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The special tokens, of which one closes a turn."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple({*added, *tokenizer.all_special_tokens})


def single_begin(tokenizer: PreTrainedTokenizerBase, ids: Ids) -> tuple[Ids, int]:
    """The ids with one begin token where text and tokenizer both brought one, and how many were removed."""
    begin = tokenizer.bos_token_id
    removed = 0
    while begin is not None and len(ids) - removed >= 2 and ids[removed] == ids[removed + 1] == begin:
        removed += 1
    return ids[removed:], removed


class Split(NamedTuple):
    """A prompt and its completions; `shifted` is 1 where the boundary is inside a token of the prompt `alone`."""

    prompt: Ids
    completions: list[Ids]
    shifted: int
    removed_begin_tokens: int
    alone: Ids


def tokenize_split(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[tuple[str, Sequence[str]]], *, add_special_tokens: bool,
    adds_eos: bool = True, is_chat: bool = False, is_encoder_decoder: bool = False,
) -> list[Split]:  # fmt: skip
    """Prompts and the completions of each, which are `closed`; with `adds_eos=False` exactly the given texts.

    Both are tokenised together; the boundary is the first token that the prompt alone does not have. The two sides of
    an encoder-decoder are tokenised apart, the prompt with an eos token of its own.
    """
    prompts = list(dict.fromkeys(prompt for prompt, _ in rows))
    if is_encoder_decoder:
        options: RowDict = {"add_special_tokens": add_special_tokens, "is_chat": is_chat}
        heads = dict(zip(prompts, encode_closed(tokenizer, prompts, **options), strict=True))
        texts = [answer for _, answers in rows for answer in answers]
        ended = iter(closed(encode(tokenizer, texts), texts, tokenizer, is_chat=is_chat))
        return [
            Split(head, [next(ended) for _ in row], 0, removed, head)
            for head, removed, row in ((*heads[prompt], row) for prompt, row in rows)
        ]
    texts = [prompt + answer for prompt, answers in rows for answer in answers]
    if adds_eos:
        opened = encode_open(tokenizer, [*prompts, *texts], add_special_tokens=add_special_tokens)
    else:
        opened = [(ids, 0) for ids in encode(tokenizer, [*prompts, *texts])]
    alone, wholes = dict(zip(prompts, opened, strict=False)), opened[len(prompts) :]
    ended = [ids for ids, _ in wholes]
    ended = closed(ended, texts, tokenizer, is_chat=is_chat) if adds_eos else ended
    sides = iter(zip(ended, [removed for _, removed in wholes], strict=True))
    splits = []
    for prompt, answers in rows:
        (head, _), together = alone[prompt], [next(sides) for _ in answers]
        boundary = min(common_prefix_length(head, ids) for ids, _ in together)
        completions = [ids[boundary:] for ids, _ in together]
        splits.append(Split(head[:boundary], completions, int(boundary < len(head)), together[0][1], head))
    return splits
