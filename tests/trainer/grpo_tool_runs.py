"""Small runs of GRPO and RLOO with tools; as a program under torchrun: `-m tests.trainer.grpo_tool_runs OUT.pt SETTINGS`."""

import functools
import sys
from typing import Any

import torch
from datasets import Dataset

from tests.agents.tool_words import TOOLS, call_tokenizer
from tests.tiny import tiny_model
from tests.trainer import grpo_runs

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


def make(method: str = "grpo", *, reward_funcs: Any = many_tools, **settings: Any) -> tuple[Any, Any]:
    """A trainer whose policy is a `caller`; and what will hold the gradients of its steps."""
    dtype = getattr(torch, settings.get("dtype", "float64"))
    given = {"processing_class": call_tokenizer(), "tools": TOOLS, **settings.pop("given", {})}
    if given.get("model") is None:
        given["model"] = caller(settings.get("architecture", "gpt2"), dtype)
    own = {"max_completion_length": 24, "max_tool_calling_iterations": 3, "data": conversations(), **settings}
    return grpo_runs.make(method, reward_funcs=reward_funcs, given=given, **own)


run = functools.partial(grpo_runs.run, make=make)

if __name__ == "__main__":
    grpo_runs.main(*sys.argv[1:], make=make, rows=conversations(3))
