"""Tokenised preference pairs with the lengths of HH harmless dialogues, and rows for reward models and KTO from them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from benchmarks.data import BPE_SIZE, Corpus, LengthLaw, train_bpe, word_tokenizer

HARMLESS = Path(__file__).resolve().parents[2] / "shared/data/hh_harmless/train.jsonl"
TURN = "Assistant:"
# Fitted to HH harmless under the BPE of data.py.
HARMLESS_LENGTHS = LengthLaw(prompt=(98.0, 1.0), completion=(34.0, 0.92))


def load_pairs(path: Path | None = None, *, max_length: int, rows: int = 1500) -> Corpus:
    """Pairs of a jsonl file of dialogues (`chosen`, `rejected`); made-up ones where it is missing.

    Raises: FileNotFoundError for a path that was asked for and is not there.
    """
    if path is not None and not path.is_file():
        raise FileNotFoundError(f"--data must be a jsonl file, got {path}. Leave it out for made-up pairs.")
    path = path or HARMLESS
    if path.is_file():
        return read_pairs(path, max_length=max_length, rows=rows)
    name = "made-up pairs as long as HH harmless"
    return made_up_pairs(HARMLESS_LENGTHS, max_length=max_length, rows=rows, name=name)


def read_pairs(path: Path, *, max_length: int, rows: int) -> Corpus:
    """Dialogues split at their last answer, under a BPE trained on all of them; prompts keep their end."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    tokenizer = train_bpe([line[side] for line in lines for side in ("chosen", "rejected")])
    found = []
    for line in lines[:rows]:
        prompt, chosen = _split(line["chosen"])
        other, rejected = _split(line["rejected"])
        if prompt != other or chosen == rejected:
            continue
        ids = tokenizer([prompt, chosen, rejected])["input_ids"]
        completions = [[*part, tokenizer.eos_token_id][: max_length // 2] for part in ids[1:]]
        room = max_length - max(map(len, completions))
        found.append(pair_row(ids[0][-room:], *completions))
    return Corpus(found, tokenizer, f"{path.parent.name}/{path.name}")


def _split(dialogue: str) -> tuple[str, str]:
    end = dialogue.rfind(TURN) + len(TURN)
    return dialogue[:end], dialogue[end:]


def made_up_pairs(law: LengthLaw, *, max_length: int, rows: int, name: str, seed: int = 0) -> Corpus:
    """Random token ids with the lengths of a law."""
    rng = random.Random(seed)

    def ids(length: int) -> list[int]:
        return [rng.randrange(3, BPE_SIZE) for _ in range(length)]

    found = []
    for _ in range(rows):
        prompt, chosen = law.draw(rng, max_length=max_length)
        _, rejected = law.draw(rng, max_length=max_length)
        found.append(pair_row(ids(prompt), ids(chosen), ids(min(rejected, max_length - prompt))))
    return Corpus(found, word_tokenizer(), name)


def pairs_of_ratio(ratio: int, *, completion: int = 48, rows: int = 200) -> Corpus:
    """Made-up pairs whose prompt is `ratio` times as long as each completion."""
    law = LengthLaw(prompt=(float(ratio * completion), 0.2), completion=(float(completion), 0.2))
    return made_up_pairs(law, max_length=4096, rows=rows, name=f"prompt : completion = {ratio} : 1")


def pair_row(prompt: list[int], chosen: list[int], rejected: list[int]) -> dict[str, Any]:
    """One pair as `DPOTrainer` prepares it."""
    return {"prompt_input_ids": prompt, "chosen_input_ids": chosen, "rejected_input_ids": rejected}


def reward_rows(corpus: Corpus) -> Corpus:
    """The same pairs as whole sequences."""
    rows = [
        {side: row["prompt_input_ids"] + row[side] for side in ("chosen_input_ids", "rejected_input_ids")}
        for row in corpus.rows
    ]
    return Corpus(rows, corpus.tokenizer, corpus.source)


def unpaired_rows(corpus: Corpus, *, group: int = 8) -> Corpus:
    """The chosen completion of every second pair, desirable, and the rejected one of the others.

    The mismatched completions, which `KTOTrainer` finds itself, are there for loops that are given the rows alone: each
    is that of the row before, in a ring of `group` rows.
    """
    rows = [
        {
            "prompt_input_ids": row["prompt_input_ids"],
            "completion_input_ids": row["rejected_input_ids" if number % 2 else "chosen_input_ids"],
            "label": number % 2 == 0,
        }
        for number, row in enumerate(corpus.rows[: len(corpus.rows) // group * group])
    ]
    for start in range(0, len(rows), group):
        completions = [row["completion_input_ids"] for row in rows[start : start + group]]
        for number, row in enumerate(rows[start : start + group]):
            row["KL_completion_input_ids"] = completions[number - 1]
    return Corpus(rows, corpus.tokenizer, corpus.source)


def describe_pairs(corpus: Corpus) -> str:
    """How many pairs there are, and their mean lengths."""
    names = ("prompt_input_ids", "chosen_input_ids", "rejected_input_ids")
    prompt, chosen, rejected = (sum(len(row[name]) for row in corpus.rows) / len(corpus.rows) for name in names)
    return (
        f"{corpus.source}: {len(corpus.rows)} pairs, in the mean {prompt:.0f} tokens of prompt, {chosen:.0f} of chosen and "
        f"{rejected:.0f} of rejected completion"
    )
