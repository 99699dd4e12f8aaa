"""What is measured on problems: right answers, the reward model's score of answers, the distance from the reference."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl.data.rendering import Chat, render_prompt
from trl.generation.engine import Sampling
from trl.generation.transformers.engine import TransformersEngine
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


def _greedy_replies(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, problems: Sequence[Problem]
) -> list[str]:
    prompts = [prompt_ids(tokenizer, task, problem) for problem in problems]
    sampling = Sampling(max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False, seed=0)
    found = TransformersEngine(model, tokenizer=tokenizer).generate(prompts, sampling)
    return tokenizer.batch_decode([completion.ids for completion in found], skip_special_tokens=True)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, task: Task, problem: Problem) -> list[int]:
    """The conversation up to where the model answers, as token ids."""
    text = render_prompt(tokenizer, Chat(list(task.prompt_messages(problem))))
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@torch.no_grad()
def mean_reward(
    reward_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    replies: Sequence[str],
    *,
    task: Task,
) -> float:
    """The mean score of replies to the problems, each ended with the stop token."""
    ends = [
        [*tokenizer(reply, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        for reply in replies
    ]
    rows = [
        torch.tensor(prompt_ids(tokenizer, task, problem) + end)
        for problem, end in zip(problems, ends, strict=True)
    ]
    lengths = torch.tensor([len(row) for row in rows])
    ids = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)  # type: ignore[arg-type]
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    scores = reward_model.eval()(input_ids=ids, attention_mask=mask.long()).logits[:, 0]
    return scores.mean().item()


@torch.no_grad()
def kl_divergence(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    *,
    task: Task,
    seed: int,
) -> float:
    """KL(model || reference) of whole answers, in nats: the mean over one sampled answer per problem.

    At each position of a sampled answer the divergence is taken over the whole vocabulary; their sum has the same mean as
    the log-ratio of the answer, and less noise.
    """
    prompts = [prompt_ids(tokenizer, task, problem) for problem in problems]
    sampling = Sampling(max_new_tokens=MAX_ANSWER_TOKENS, seed=seed)
    found = TransformersEngine(model, tokenizer=tokenizer).generate(prompts, sampling)
    rows = [torch.tensor(prompt + done.ids) for prompt, done in zip(prompts, found, strict=True)]
    starts = torch.tensor(
        [len(prompt) - 1 for prompt in prompts]
    )  # the position that predicts the first token
    ends = torch.tensor([len(row) - 1 for row in rows])
    ids = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)  # type: ignore[arg-type]
    places = torch.arange(ids.shape[1])
    answered = (places >= starts[:, None]) & (places < ends[:, None])
    mine, other = (one.eval()(input_ids=ids).logits.log_softmax(-1) for one in (model, reference))
    return ((mine.exp() * (mine - other)).sum(-1) * answered).sum(-1).mean().item()
