"""Small runs of GRPO, RLOO and PAPO on prompts with images; under torchrun: `-m tests.trainer.image_prompt_runs OUT SETTINGS`."""

import functools
import sys
from typing import Any

import torch
from datasets import Dataset

from tests.tiny_vision import tiny_image, tiny_processor, tiny_vision_model
from tests.trainer import grpo_runs

QUESTION = {"role": "user", "content": "What is it?"}


def rows() -> list[dict[str, Any]]:
    """Prompts of different lengths with 0 to 2 images; the first two differ by their image alone."""
    counts = (1, 1, 2, 0, 1)
    texts = ("", "", " And this?", " Nothing.", " Long, long, long.")
    return [
        {
            "images": [tiny_image(10 * row + number) for number in range(count)],
            "prompt": [{"role": "user", "content": QUESTION["content"] + text}],
        }
        for row, (count, text) in enumerate(zip(counts, texts, strict=True))
    ]


def even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of even tokens."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def make(method: str = "grpo", **settings: Any) -> tuple[Any, Any]:
    """A trainer, and what will hold the gradients of its steps; `given` are further arguments of its constructor."""
    family, given = settings.pop("family", "llava"), {**settings.pop("given", {})}
    settings = {"dtype": "float32", "max_prompt_length": None, "data": Dataset.from_list(rows()), **settings}
    if given.get("processing_class") is None:
        given["processing_class"] = tiny_processor(family)
    if given.get("model") is None:
        dtype = getattr(torch, settings["dtype"])
        given["model"] = tiny_vision_model(given["processing_class"], family, dtype=dtype)
    return grpo_runs.make(method, **{"reward_funcs": even_tokens, "given": given, **settings})


run = functools.partial(grpo_runs.run, make=make)

if __name__ == "__main__":
    grpo_runs.main(*sys.argv[1:], make=make, rows=Dataset.from_list(rows()[1:4]))
