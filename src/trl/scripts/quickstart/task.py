"""Digits to sort as training data, and a tokenizer and a model small enough to learn it on a CPU."""

import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from trl.generation.engine import Sampling
from trl.generation.transformers.engine import TransformersEngine
from trl.models.switches import in_eval_mode

DIGITS, TRAIN, HELD_OUT = 4, 3000, 300
MAX_ANSWER_TOKENS = DIGITS + 1  # and the eos token
SAMPLES_PER_PROMPT = 4

Row = dict[str, str]


class Task(NamedTuple):
    """Rows with `prompt` ("sort 7391:") and `completion` ("1379"); `train` and `held_out` share no set of digits."""

    train: list[Row]
    held_out: list[Row]


def make_task(*, seed: int) -> Task:
    """Orders of `DIGITS` different digits, drawn by `seed`; a sixth of the sets of digits are for evaluation."""
    draw = random.Random(seed)
    sets = list(itertools.combinations("0123456789", DIGITS))
    draw.shuffle(sets)
    kept = len(sets) // 6
    return Task(_rows(sets[kept:], TRAIN, draw), _rows(sets[:kept], HELD_OUT, draw))


def _rows(sets: Sequence[tuple[str, ...]], count: int, draw: random.Random) -> list[Row]:
    orders = dict.fromkeys("".join(draw.sample(draw.choice(sets), DIGITS)) for _ in range(2 * count))
    return [{"prompt": f"sort {order}:", "completion": "".join(sorted(order))} for order in list(orders)[:count]]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per digit."""
    vocabulary = ["<pad>", "<eos>", "<unk>", "sort ", ":", *"0123456789"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d|\D+"), "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def build_model(tokenizer: PreTrainedTokenizerFast, *, seed: int, layers: int = 2) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=layers,
        num_attention_heads=4, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=None,
        initializer_range=0.08,  # at the usual 0.02 a model this narrow learns several times slower
        eos_token_id=tokenizer.eos_token_id,  # type: ignore[arg-type]
        pad_token_id=tokenizer.pad_token_id,  # type: ignore[arg-type]
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def replies(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row], *, greedy: bool = True,
    seed: int = 0,
) -> list[str]:  # fmt: skip
    """The model's answer to each row's prompt: the most likely one, or one sampled at temperature 1."""
    prompts = tokenizer([row["prompt"] for row in rows])["input_ids"]
    sampling = Sampling(max_new_tokens=MAX_ANSWER_TOKENS, do_sample=not greedy, seed=seed)
    with in_eval_mode(model):
        completions = TransformersEngine(model, tokenizer=tokenizer).generate(prompts, sampling)
    return tokenizer.batch_decode([completion.ids for completion in completions], skip_special_tokens=True)


def is_right(completions: Sequence[str], answer: Sequence[str], **columns: object) -> list[float]:
    """Reward function: 1 for the right digits and nothing else, 0 otherwise."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


def share_right(answers: Sequence[str], rows: Sequence[Row]) -> float:
    """Exact match: the share of answers that are right, in 0..1."""
    return sum(is_right(answers, [row["completion"] for row in rows])) / len(rows)


def make_pairs(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row], *, seed: int
) -> list[Row]:
    """Right answers against mistakes: the model's, and random ones, lest PPO finds what no reward model saw."""
    prompts = [row for row in rows for _ in range(SAMPLES_PER_PROMPT)]
    sampled = replies(model, tokenizer, prompts, greedy=False, seed=seed)
    draw = random.Random(seed)
    pairs = []
    for number, row in enumerate(rows):
        right, place = row["completion"], draw.randrange(DIGITS)
        samples = sampled[number * SAMPLES_PER_PROMPT : (number + 1) * SAMPLES_PER_PROMPT]
        mistakes = [text for text in dict.fromkeys(samples) if text not in ("", right)][:2]
        other = draw.choice([digit for digit in "0123456789" if digit != right[place]])
        for digit in (other, draw.choice(["", 2 * right[place]])):  # another digit; one left out or doubled
            mistakes.append(right[:place] + digit + right[place + 1 :])
        pairs += [{"prompt": row["prompt"], "chosen": right, "rejected": text} for text in mistakes]
    return pairs
