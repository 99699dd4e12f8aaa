"""The tokens of a row with what training does to each: trained, masked, or cut off; the template's beside the text's."""

import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from trl.scripts.inspection.texts import Part
from trl.scripts.messages import Shown

READ_CHARACTERS = 2_000  # of a script
REPLACEMENT = "\ufffd"


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
    """The role of the part that a piece of a text belongs to ("prompt" or "text" where it has none); None for the rest."""
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


class ScriptCounts:
    """How many pieces the words of each script become, and how many of these are bytes or unknown."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._characters: Counter[str] = Counter()
        self._pieces: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()

    def read(self, text: str) -> set[str]:
        """Count the words of a text, up to `READ_CHARACTERS` of a script; returns its scripts."""
        scripts = set(map(script_of, set(text))) - {""}
        is_counted = all(self._characters[script] >= READ_CHARACTERS for script in scripts)
        for script, run in () if is_counted else script_runs(text):
            if self._characters[script] >= READ_CHARACTERS:
                continue
            ids = self._tokenizer(run, add_special_tokens=False)["input_ids"]
            self._characters[script] += len(run)
            self._pieces[script] += len(ids)
            self._lost[script] += sum(map(self._is_lost, ids))
        return scripts

    def _is_lost(self, token: int) -> bool:
        name = str(self._tokenizer.convert_ids_to_tokens(token))
        is_byte = name.startswith("<0x") or REPLACEMENT in self._tokenizer.decode([token])
        return is_byte or token == self._tokenizer.unk_token_id

    def lost(self, *, least: int = 20, share: float = 0.5) -> dict[str, float]:
        """The share of lost pieces of each script of at least `least` characters where it is above `share`."""
        shares = {name: self._lost[name] / self._pieces[name] for name in self._pieces if self._pieces[name]}
        return {name: lost for name, lost in shares.items() if lost > share and self._characters[name] >= least}


@cache
def script_of(character: str) -> str:
    """The script of a letter, the first word of its Unicode name: LATIN, CYRILLIC, CJK; "" of others."""
    return unicodedata.name(character, "").split(" ")[0] if character.isalpha() else ""


def script_runs(text: str) -> Iterator[tuple[str, str]]:
    """The words of a text with their scripts."""
    run, script = "", ""
    for character in f"{text} ":
        name = script_of(character)
        if name != script and run:
            yield script, run
            run = ""
        script, run = name, run + character if name else ""
