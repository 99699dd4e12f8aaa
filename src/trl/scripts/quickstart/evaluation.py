"""Accuracy on problems, by letting the model answer them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl.data.rendering import Chat, render_prompt
from trl.scripts.quickstart.task import Problem, Task

MAX_ANSWER_TOKENS = 8


class Evaluation(NamedTuple):
    """Share of right replies (0 to 1), and the replies in the order of the problems."""

    accuracy: float
    replies: list[str]


def exact_match(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    batch_size: int,
    *,
    task: Task,
) -> Evaluation:
    """Greedy replies to the problems, and the share of them that are the right number and nothing else.

    A reply that does not stop within 8 tokens counts as it stands. The model is left in the mode it was in.
    """
    replies: list[str] = []
    training = model.training
    model.eval()
    for start in range(0, len(problems), batch_size):
        replies += _greedy_replies(model, tokenizer, task, problems[start : start + batch_size])
    model.train(training)
    right = sum(task.is_correct(problem, reply) for problem, reply in zip(problems, replies, strict=True))
    return Evaluation(right / len(problems), replies)


@torch.no_grad()
def _greedy_replies(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, problems: Sequence[Problem]
) -> list[str]:
    texts = [render_prompt(tokenizer, Chat(list(task.prompt_messages(problem)))) for problem in problems]
    batch = tokenizer(
        texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
    ).to(model.device)
    output = model.generate(**batch, do_sample=False, max_new_tokens=MAX_ANSWER_TOKENS)  # type: ignore[operator]
    width = batch["input_ids"].shape[1]
    return tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
