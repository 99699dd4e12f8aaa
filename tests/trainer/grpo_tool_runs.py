"""Small runs of GRPO and RLOO with tools; as a program under torchrun: `-m tests.trainer.grpo_tool_runs OUT.pt SETTINGS`."""

import json
import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset

from tests.rollouts.tool_words import TOOLS, call_tokenizer
from tests.tiny import tiny_model
from tests.trainer.grpo_runs import CLOCKS, SETTINGS, TRAINERS, logs
from tests.trainer.one_step import KeepGradients

QUESTIONS = ["What is one ?", "hi", "yes no", "two three ? hi no", "is no"]


def conversations(count: int = len(QUESTIONS)) -> Dataset:
    """Prompts of one message."""
    return Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in QUESTIONS[:count]])


def many_tools(completions: Any, completion_ids: Any, **_: Any) -> list[float]:
    """Calls that were answered, and a little for length."""
    answered = [sum(message["role"] == "tool" for message in each) for each in completions]
    return [count + 0.01 * len(ids) for count, ids in zip(answered, completion_ids, strict=True)]


def caller(architecture: str = "gpt2", dtype: torch.dtype = torch.float64) -> Any:
    """A policy of random weights that calls tools often, and ends its turns soon."""
    words = call_tokenizer()
    model = tiny_model(architecture, dtype=dtype, vocab_size=len(words), initializer_range=0.2)
    ends = ["</s>", "yes", "no", "hi", "?", "3"]
    model.generation_config.eos_token_id = words.convert_tokens_to_ids(ends)
    return model


def make(
    method: str = "grpo", *, reward_funcs: Any = many_tools, **settings: Any
) -> tuple[Any, KeepGradients]:
    """A trainer whose policy is a `caller`; and what will hold the gradients of its steps."""
    keep, (config, trainer) = KeepGradients(), TRAINERS[method]
    dtype, given = getattr(torch, settings.pop("dtype", "float64")), settings.pop("given", {})
    data, architecture = settings.pop("data", None), settings.pop("architecture", "gpt2")
    own = {"max_completion_length": 24, "max_tool_calling_iterations": 3, **settings}
    args = config(own.pop("folder", None) or tempfile.mkdtemp(), **{**SETTINGS, **own})
    made = trainer(
        given.pop("model", None) or caller(architecture, dtype),
        reward_funcs=reward_funcs,
        args=args,
        train_dataset=conversations() if data is None else data,
        callbacks=[keep, *given.pop("callbacks", [])],
        **{"processing_class": call_tokenizer(), "tools": TOOLS, **given},
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
    metrics = trainer.evaluate(conversations(3))
    if trainer.is_world_process_zero():
        found = {name: value for name, value in metrics.items() if not any(word in name for word in CLOCKS)}
        torch.save({"gradients": keep.steps, "logs": logs(trainer), "eval": found}, out)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
