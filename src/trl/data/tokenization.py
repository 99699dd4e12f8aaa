"""Texts and conversations of rows -> token ids, and the boundary between prompt and completion."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from trl.data.formats import (
    common_prefix_length,
    maybe_convert_to_chatml,
    prepare_multimodal_messages,
    remove_none_values,
)
from trl.data.rendering import Chat, ProcessingClass, read_tools, template_source
from trl.data.validation import Place, accepted_roles, check_messages, check_text

Ids = list[int]


def rows_of(batch: Mapping[str, Sequence]) -> list[dict[str, Any]]:
    """The rows of a batch given as columns."""
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def read_text(
    processing_class: ProcessingClass, row: Mapping[str, Any], place: Place, *, may_be_empty: bool = False
) -> str:
    """The text in the column at `place`, checked; without a placeholder for images."""
    text = check_text(row.get(place.column), place, may_be_empty=may_be_empty)
    image = getattr(processing_class, "image_token", None)
    if image and str(image) in text and isinstance(processing_class, ProcessorMixin):
        raise ValueError(
            f"{place}: the text holds the placeholder {str(image)!r}, but the rows have no images. Give them in a column "
            "'images' or 'image', or remove it."
        )
    return text


def read_chat(
    processing_class: ProcessingClass,
    row: Mapping[str, Any],
    place: Place,
    *,
    tools: Sequence[dict | Callable] | None = None,
) -> Chat:
    """The messages in the column at `place`, checked, with the row's template variables and tools.

    `tools` stand in for those of the row's own column.

    Raises: TypeError or ValueError naming the place where messages, tools or template variables are not readable.
    """
    roles = accepted_roles(template_source(processing_class))
    messages = check_messages(maybe_convert_to_chatml(dict(row)).get(place.column), place, roles=roles)
    if isinstance(processing_class, ProcessorMixin):
        with place.named():
            messages = prepare_multimodal_messages(messages, images=[])
    return Chat(messages, *template_inputs(row, place, tools=tools))


def template_inputs(
    row: Mapping[str, Any], place: Place, *, tools: Sequence[dict | Callable] | None = None
) -> tuple[list[dict | Callable] | None, dict[str, Any]]:
    """The tools of a row, and its variables for the chat template."""
    with place._replace(column="tools").named():
        found = read_tools(row.get("tools") if tools is None else tools)
    kwargs = row.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict):
        place, remedy = place._replace(column="chat_template_kwargs"), "Give one dict for each row."
        raise place.error(f"a {type(kwargs).__name__}", "a dict of template variables", remedy, TypeError)
    return found, remove_none_values(kwargs)


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Ids]:
    """Token ids of texts that bring their own special tokens: none are added."""
    return tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []  # type: ignore[return-value]


def encode_open(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool = True
) -> list[tuple[Ids, int]]:
    """Token ids of texts that something follows, and how many begin tokens were removed.

    The tokenizer's begin token is kept once where the text already starts with it; an end token that the tokenizer
    adds is taken off.
    """
    encoded = tokenizer(list(texts), add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    opened = [single_begin(tokenizer, ids) for ids in encoded]  # type: ignore[union-attr]
    eos, eos_text = tokenizer.eos_token_id, str(tokenizer.eos_token)
    return [
        (ids[:-1] if ids and ids[-1] == eos and not text.endswith(eos_text) else ids, removed)
        for text, (ids, removed) in zip(texts, opened, strict=True)
    ]


def encode_closed(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool = True
) -> list[tuple[Ids, int]]:
    """Token ids of texts that end here, each with one eos token at its end, and how many begin tokens were removed."""
    opened = encode_open(tokenizer, texts, add_special_tokens=add_special_tokens)
    return [(closed(ids, tokenizer), removed) for ids, removed in opened]


def closed(ids: Ids, tokenizer: PreTrainedTokenizerBase) -> Ids:
    """The ids with an eos token at their end, unless they have it."""
    eos: int = tokenizer.eos_token_id  # type: ignore[assignment]
    return ids if ids and ids[-1] == eos else [*ids, eos]


def single_begin(tokenizer: PreTrainedTokenizerBase, ids: Ids) -> tuple[Ids, int]:
    """The ids with one begin token where text and tokenizer both brought one, and how many were removed."""
    begin = tokenizer.bos_token_id
    removed = 0
    while begin is not None and len(ids) - removed >= 2 and ids[removed] == ids[removed + 1] == begin:
        removed += 1
    return ids[removed:], removed


class Split(NamedTuple):
    """A prompt and the completions behind it; 1 in `shifted` where the boundary is inside a token of the prompt."""

    prompt: Ids
    completions: list[Ids]
    shifted: int
    removed_begin_tokens: int


def split_ids(head: Ids, wholes: Sequence[Ids]) -> tuple[int, int]:
    """The boundary: the first token that the prompt alone (`head`) does not have; and whether it is inside a token."""
    boundary = min(common_prefix_length(head, whole) for whole in wholes)
    return boundary, int(boundary < len(head))


def tokenize_split(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[tuple[str, Sequence[str]]],
    *,
    add_special_tokens: bool,
    is_encoder_decoder: bool = False,
) -> list[Split]:
    """Prompts and the completions of each, which end with one eos token.

    Both are tokenised together, so that no text is lost at the boundary. The two sides of an encoder-decoder are
    tokenised apart, the prompt with an eos token of its own.
    """
    texts = list(dict.fromkeys(prompt for prompt, _ in rows))
    encode_prompts = encode_closed if is_encoder_decoder else encode_open
    heads = dict(
        zip(texts, encode_prompts(tokenizer, texts, add_special_tokens=add_special_tokens), strict=True)
    )
    if is_encoder_decoder:
        answers = iter(encode(tokenizer, [answer for _, answers in rows for answer in answers]))
        return [
            Split(heads[prompt][0], [closed(next(answers), tokenizer) for _ in row], 0, heads[prompt][1])
            for prompt, row in rows
        ]
    joint = [prompt + answer for prompt, answers in rows for answer in answers]
    wholes = iter(encode_closed(tokenizer, joint, add_special_tokens=add_special_tokens))
    splits = []
    for prompt, row in rows:
        own = [next(wholes) for _ in row]
        boundary, shifted = split_ids(heads[prompt][0], [ids for ids, _ in own])
        completions = [ids[boundary:] for ids, _ in own]
        splits.append(Split(heads[prompt][0][:boundary], completions, shifted, own[0][1]))
    return splits
