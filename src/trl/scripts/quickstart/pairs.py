"""Preference pairs: the right answer, and a wrong one that the model gave itself."""

import random
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl.generation.engine import Sampling
from trl.generation.transformers.engine import TransformersEngine
from trl.scripts.quickstart.evaluation import MAX_ANSWER_TOKENS, prompt_ids
from trl.scripts.quickstart.task import Problem, Task

SAMPLES_PER_PROBLEM = 4
PLACES = (1, 10)


def make_pairs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    *,
    task: Task,
    seed: int,
) -> list[dict[str, Any]]:
    """Rows with `prompt`, `chosen` (the right answer) and `rejected` (a wrong one), as messages; problem by problem.

    Three wrong answers each: one of those among four that the model sampled, where there is one, and a slip in each place.
    The model errs in one place more than in the other; of its own mistakes alone a reward model learns to look at that
    one, and a policy that is trained on the rewards finds out. Replies that are no numbers, or did not stop, are as wrong
    as others.
    """
    samples = sample_replies(model, tokenizer, problems, task=task, copies=SAMPLES_PER_PROBLEM, seed=seed)
    draw = random.Random(seed)
    rows = []
    for problem, replies in zip(problems, samples, strict=True):
        own = {reply.strip() for reply in replies if reply.strip() and not task.is_correct(problem, reply)}
        wrong = draw.sample(sorted(own), min(len(own), 1))
        wrong += [task.slip(problem, place, draw) for place in PLACES]
        rows += [task.pair(problem, answer) for answer in dict.fromkeys(wrong)]
    return rows


def sample_replies(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    *,
    task: Task,
    copies: int,
    seed: int,
) -> list[list[str]]:
    """`copies` replies to each problem, sampled at temperature 1; they depend on the model and `seed` alone."""
    prompts = [ids for problem in problems for ids in [prompt_ids(tokenizer, task, problem)] * copies]
    sampling = Sampling(max_new_tokens=MAX_ANSWER_TOKENS, seed=seed)
    found = TransformersEngine(model, tokenizer=tokenizer).generate(prompts, sampling)
    texts = tokenizer.batch_decode([completion.ids for completion in found], skip_special_tokens=True)
    return [texts[start : start + copies] for start in range(0, len(texts), copies)]
