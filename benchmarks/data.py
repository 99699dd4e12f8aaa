"""Prompt-completion rows with the lengths of GSM8K, and a tokenizer to go with them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BPE_SIZE = 5000
GSM8K = Path(__file__).resolve().parents[2] / "shared/data/gsm8k/train.jsonl"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LengthLaw:
    """Log-normal numbers of tokens: median and spread of prompts, and of completions (stop token included)."""

    prompt: tuple[float, float]
    completion: tuple[float, float]

    def draw(self, rng: random.Random, *, max_length: int) -> tuple[int, int]:
        sizes = (self.prompt, self.completion)
        prompt, completion = (max(2, round(median * rng.lognormvariate(0, spread))) for median, spread in sizes)
        prompt = min(prompt, max_length - 2)
        return prompt, min(completion, max_length - prompt)


# Fitted to GSM8K under the BPE of this file (6,000 rows), and a longer one for accelerators.
GSM8K_LENGTHS = LengthLaw(prompt=(56.0, 0.37), completion=(89.0, 0.43))
LONG_LENGTHS = LengthLaw(prompt=(300.0, 0.6), completion=(500.0, 0.7))


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokenised rows (`input_ids`, `completion_mask`), the tokenizer, and where they come from."""

    rows: list[Row]
    tokenizer: PreTrainedTokenizerFast
    source: str

    def describe(self) -> str:
        total = [len(row["input_ids"]) for row in self.rows]
        trained = sum(sum(row["completion_mask"]) for row in self.rows)
        return (
            f"{self.source}: {len(total)} rows, {sum(total) / len(total):.0f} tokens in the mean (longest "
            f"{max(total)}), of which {trained / len(total):.0f} are trained"
        )


def load_corpus(path: Path | None = None, *, max_length: int, rows: int = 2000) -> Corpus:
    """The first rows of a jsonl file with question/answer or prompt/completion; made-up ones where it is missing.

    Raises: FileNotFoundError for a path that was asked for and is not there.
    """
    if path is not None and not path.is_file():
        raise FileNotFoundError(f"--data must be a jsonl file, got {path}. Leave it out for made-up rows.")
    path = path or GSM8K
    if path.is_file():
        return read_corpus(path, max_length=max_length, rows=rows)
    return made_up_corpus(GSM8K_LENGTHS, max_length=max_length, rows=rows, name="made-up rows as long as GSM8K's")


def read_corpus(path: Path, *, max_length: int, rows: int) -> Corpus:
    """Rows of a file under a BPE trained on all of it, in memory; cut to `max_length` tokens."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    question, answer = ("question", "answer") if "question" in lines[0] else ("prompt", "completion")
    tokenizer = train_bpe([line[question] + "\n" + line[answer] for line in lines])
    prompts = tokenizer([line[question] + "\n" for line in lines[:rows]])["input_ids"]
    answers = tokenizer([line[answer] for line in lines[:rows]])["input_ids"]
    found = []
    for prompt, completion in zip(prompts, answers, strict=True):
        completion = [*completion, tokenizer.eos_token_id]
        if len(prompt) < max_length:
            found.append(_row(prompt, completion[: max_length - len(prompt)]))
    return Corpus(found, tokenizer, f"{path.parent.name}/{path.name}")


def made_up_corpus(law: LengthLaw, *, max_length: int, rows: int, name: str, seed: int = 0) -> Corpus:
    """Random token ids with the lengths of a law."""
    rng = random.Random(seed)
    found = []
    for _ in range(rows):
        prompt, completion = law.draw(rng, max_length=max_length)
        ids = [rng.randrange(3, BPE_SIZE) for _ in range(prompt + completion)]
        found.append(_row(ids[:prompt], ids[prompt:]))
    return Corpus(found, word_tokenizer(), name)


def _row(prompt: list[int], completion: list[int]) -> Row:
    mask = [0] * len(prompt) + [1] * len(completion)
    return {"input_ids": [*prompt, *completion], "completion_mask": mask}


def train_bpe(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 5,000 tokens trained on some texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_SIZE,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer to go with random token ids."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, BPE_SIZE)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
