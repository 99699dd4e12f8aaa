"""Small runs of GRPO, RLOO and PAPO on prompts with images; under torchrun: `-m tests.trainer.image_prompt_runs OUT SETTINGS`."""

import json
import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset

from tests.tiny_vision import tiny_image, tiny_processor, tiny_vision_model
from tests.trainer.grpo_runs import SETTINGS, TRAINERS, logs
from tests.trainer.one_step import KeepGradients

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


def make(
    method: str = "grpo", *, reward_funcs: Any = even_tokens, data: Any = None, **settings: Any
) -> tuple[Any, KeepGradients]:
    """A trainer, and what will hold the gradients of its steps; `given` are further arguments of its constructor."""
    keep, given = KeepGradients(), settings.pop("given", {})
    config, trainer = settings.pop("classes", None) or TRAINERS[method]
    family, dtype = settings.pop("family", "llava"), getattr(torch, settings.pop("dtype", "float32"))
    processor = given.pop("processing_class", None) or tiny_processor(family)
    model = given.pop("model", None) or tiny_vision_model(processor, family, dtype=dtype)
    folder = settings.pop("folder", None) or tempfile.mkdtemp()
    args = config(folder, **{**SETTINGS, "max_prompt_length": None, **settings})
    made = trainer(
        model,
        reward_funcs=reward_funcs,
        args=args,
        train_dataset=Dataset.from_list(rows()) if data is None else data,
        processing_class=processor,
        callbacks=[keep],
        **given,
    )
    return made, keep


def run(method: str = "grpo", **settings: Any) -> tuple[Any, KeepGradients]:
    """The same, trained."""
    trainer, keep = make(method, **settings)
    trainer.train()
    return trainer, keep


def main(out: str, settings: str) -> None:
    torch.set_num_threads(1)
    trainer, keep = run(**json.loads(settings))
    metrics = trainer.evaluate(Dataset.from_list(rows()[1:4]))
    if trainer.is_world_process_zero():
        torch.save({"gradients": keep.steps, "logs": logs(trainer), "reward": metrics["eval_reward"]}, out)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
