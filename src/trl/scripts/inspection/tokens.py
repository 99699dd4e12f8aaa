"""The tokens of a row with what training does to each: trained, masked or cut off; of the template or the text."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from trl.scripts.inspection.texts import Part
from trl.scripts.messages import Shown


class Token(NamedTuple):
    """A token; `state` is "trained", "masked", "cut" or "image". `role`: of the message whose text it is part of."""

    id: int
    text: str
    state: str
    role: str | None
    is_template: bool


class ShownRow(NamedTuple):
    """A row of the data set, with its sequences of tokens by title."""

    number: int
    sequences: dict[str, list[Token]]


def shown_tokens(
    sequence: Shown, whole: Sequence[int], parts: Sequence[Part], tokenizer: PreTrainedTokenizerBase
) -> list[Token]:
    """The tokens of a sequence of a prepared row; `whole`: those of the row without limits of length."""
    _, kept, states = sequence
    cut = len(whole) - len(kept)
    if cut > 0 and list(whole[: len(kept)]) == kept:
        kept, states = list(whole), [*states, *["cut"] * cut]
    elif cut > 0 and list(whole[cut:]) == kept:
        kept, states = list(whole), [*["cut"] * cut, *states]
    pieces, special = [str(tokenizer.decode([token])) for token in kept], set(tokenizer.all_special_ids)
    roles = piece_roles(pieces, parts)
    return [
        Token(token, piece, state, role, is_template=token in special or (role is None and bool(parts)))
        for token, piece, state, role in zip(kept, pieces, states, roles, strict=True)
    ]


def piece_roles(pieces: Sequence[str], parts: Sequence[Part]) -> list[str | None]:
    """The role of the part that a piece of a text belongs to ("prompt" or "text" without one); None for the rest."""
    text, start = "".join(pieces), 0
    spans: list[tuple[int, int, str]] = []
    for part in parts:
        content = part.text if text.find(part.text, start) >= 0 else part.text.strip()  # as templates do
        place = text.find(content, start) if content else -1
        if place >= 0:
            start = place + len(content)
            spans.append((place, start, part.role or ("prompt" if part.column == "prompt" else "text")))
    ends = list(accumulate(map(len, pieces)))
    begins = [end - len(piece) for end, piece in zip(ends, pieces, strict=True)]
    return [
        next((role for first, last, role in spans if first < end and begin < last), None)
        for begin, end in zip(begins, ends, strict=True)
    ]


def lost_share(words: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, least: int = 20) -> float:
    """The share of the tokens of words that are bytes or unknown; 0 for fewer than `least` characters."""
    if sum(map(len, words)) < least:
        return 0.0
    tokens = [token for word in words for token in tokenizer(word, add_special_tokens=False)["input_ids"]]
    names = map(str, tokenizer.convert_ids_to_tokens(tokens))
    is_lost = [
        token == tokenizer.unk_token_id or name.startswith("<0x") or "\ufffd" in tokenizer.decode([token])
        for token, name in zip(tokens, names, strict=True)
    ]
    return sum(is_lost) / max(len(tokens), 1)
