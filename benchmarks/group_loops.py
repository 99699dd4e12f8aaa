"""A step of GRPO or online DPO written by hand, and ours: generate completions of some prompts, score them, learn from them.

`PaddedGRPO` and `PaddedOnlineDPO` are the usual short loops: `model.generate`, then prompts and completions in padded rows, logits
at every position, for the policy and for a reference. They do not use `trl`.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.data import Corpus
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback

BETA, EPSILON = {"grpo": 0.04, "online-dpo": 0.1}, 0.2
PHASES = ("generate", "score", "update")


@dataclass(frozen=True, slots=True)
class Work:
    """What both sides do in a step: `group` completions of each of some prompts, learned from `micro` rows at a time."""

    rows: list[list[int]]
    new_tokens: int
    stops: list[int]
    prompts: int = 4
    group: int = 8
    micro: int = 8
    learning_rate: float = 1e-5
    device: str = "cpu"
    method: str = "grpo"

    def prompts_of(self, step: int) -> list[list[int]]:
        """The prompts of a step, counted from 0."""
        first = step * self.prompts
        return [self.rows[number % len(self.rows)] for number in range(first, first + self.prompts)]


@dataclass
class Spent:
    """Seconds of one step by phase, and how many completion tokens it was for."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    tokens: int = 0
    device: str = "cpu"

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add what happens inside to a phase."""
        started = now(self.device)
        yield
        self.seconds[name] += now(self.device) - started


def now(device: str) -> float:
    """CPU seconds of the process, or on a GPU, which is waited for, seconds of the clock."""
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that costs nothing: the share of even tokens."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


# ---- by hand


@dataclass(frozen=True, slots=True)
class Completed:
    """Prompts padded on the left and their completions on the right, `(B, P + T)`: ids, what is real, what is completion."""

    ids: Tensor
    mask: Tensor
    completion: Tensor
    width: int

    @property
    def lists(self) -> list[list[int]]:
        """The completions' ids."""
        return [row[own].tolist() for row, own in zip(self.ids, self.completion.bool(), strict=True)]

    def part(self, rows: slice) -> Completed:
        return Completed(self.ids[rows], self.mask[rows], self.completion[rows], self.width)


def pad_left(prompts: Sequence[Sequence[int]], device: str) -> tuple[Tensor, Tensor]:
    """Ids and mask `(B, P)`."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = torch.tensor(prompt), 1
    return ids.to(device), mask.to(device)


class PaddedGRPO:
    """A policy, its frozen reference, fused AdamW, clipping of the gradient."""

    def __init__(self, model: PreTrainedModel, work: Work) -> None:
        self.model, self.work = copy.deepcopy(model), work
        self.reference = copy.deepcopy(model).requires_grad_(False).eval()
        self.model.generation_config.eos_token_id = work.stops or None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=work.learning_rate, weight_decay=0.0, fused=True)

    def step(self, prompts: list[list[int]]) -> Spent:
        """Generate, judge and learn."""
        spent = Spent(device=self.work.device)
        with spent.phase("generate"):
            found = self.generate([prompt for prompt in prompts for _ in range(self.work.group)])
        with spent.phase("score"):
            advantages = self.advantages(found)
            reference = [self.reference_logps(part) for part in self.parts(found)]
        with spent.phase("update"):
            self.learn(found, advantages, reference)
        spent.tokens = int(found.completion.sum())
        return spent

    @torch.no_grad()
    def generate(self, prompts: list[list[int]]) -> Completed:
        """Completions up to their first stop token."""
        ids, mask = pad_left(prompts, self.work.device)
        self.model.eval()
        generated: Any = self.model.generate(  # pyright: ignore[reportCallIssue]
            input_ids=ids, attention_mask=mask, max_new_tokens=self.work.new_tokens, pad_token_id=0, do_sample=True, top_k=0,
        )  # fmt: skip
        self.model.train()
        drawn = generated[:, ids.shape[1] :]
        stopped = torch.isin(drawn, torch.tensor(self.work.stops, device=drawn.device)).long()
        real = (stopped.cumsum(1) - stopped == 0).long()
        completion = torch.cat([torch.zeros_like(mask), real], dim=1)
        return Completed(generated, torch.cat([mask, real], dim=1), completion, ids.shape[1])

    def advantages(self, found: Completed) -> Tensor:
        """Rewards over those of their group."""
        rewards = torch.tensor(even_tokens(found.lists), device=self.work.device)
        groups = rewards.view(-1, self.work.group)
        return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()

    def parts(self, found: Completed) -> list[Completed]:
        """The micro-batches."""
        starts = range(0, len(found.ids), self.work.micro)
        return [found.part(slice(start, start + self.work.micro)) for start in starts]

    @torch.no_grad()
    def reference_logps(self, part: Completed) -> Tensor:
        """What the reference says of the completions."""
        return padded_logps(self.reference, part)

    def learn(self, found: Completed, advantages: Tensor, reference: list[Tensor]) -> None:
        """One optimiser step over all micro-batches."""
        self.backward(found, advantages, reference)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self, found: Completed, advantages: Tensor, reference: list[Tensor]) -> float:
        """The loss, a mean over the tokens of all completions (DAPO), and its gradient."""
        tokens, total = found.completion.sum(), 0.0
        own = advantages.split(self.work.micro)
        for part, advantage, ref in zip(self.parts(found), own, reference, strict=True):
            logps = padded_logps(self.model, part)
            ratio = torch.exp(logps - logps.detach())
            clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
            loss = -torch.minimum(ratio * advantage[:, None], clipped * advantage[:, None])
            gap = ref - logps
            loss = loss + BETA["grpo"] * (gap.exp() - 1 - gap)
            loss = (loss * part.completion[:, part.width :]).sum() / tokens
            loss.backward()
            total += loss.item()
        return total


class PaddedOnlineDPO(PaddedGRPO):
    """The same with DPO's loss on the two completions of each prompt, unless their scores are equal."""

    def advantages(self, found: Completed) -> Tensor:
        """Their scores."""
        return torch.tensor(even_tokens(found.lists), device=self.work.device)

    def backward(self, found: Completed, advantages: Tensor, reference: list[Tensor]) -> float:
        """The loss, a mean over pairs, and its gradient."""
        first, second = advantages.view(-1, 2).unbind(1)
        signs, total = torch.sign(first - second), 0.0
        for part, sign, ref in zip(self.parts(found), signs.split(self.work.micro // 2), reference, strict=True):
            gaps = (padded_logps(self.model, part) - ref) * part.completion[:, part.width :]
            first, second = gaps.sum(1).view(-1, 2).unbind(1)
            losses = -F.logsigmoid(BETA["online-dpo"] * sign * (first - second))
            loss = (losses * sign.abs()).sum() / signs.abs().sum()
            loss.backward()
            total += loss.item()
        return total


LOOPS = {"grpo": PaddedGRPO, "online-dpo": PaddedOnlineDPO}


def padded_logps(model: PreTrainedModel, part: Completed) -> Tensor:
    """Log-probs of the completions' tokens, `(B, T)`, from logits at every position."""
    positions = (part.mask.cumsum(1) - 1).clamp(min=0)
    logits = model(part.ids, attention_mask=part.mask, position_ids=positions, use_cache=False).logits
    logits, targets = logits[:, part.width - 1 : -1], part.ids[:, part.width :]
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return -losses.view_as(targets)


# ---- ours


def make_trainer(
    model: PreTrainedModel, work: Work, tokenizer: PreTrainedTokenizerBase, *, steps: int, **settings: Any
) -> Any:
    """`GRPOTrainer` or `OnlineDPOTrainer` with the same settings; `settings` are further ones of its config."""
    from trl import GRPOConfig, GRPOTrainer, OnlineDPOConfig, OnlineDPOTrainer

    model.generation_config.eos_token_id = work.stops or None
    kind, batch = GRPOConfig, work.micro
    if work.method == "online-dpo":  # whose batches are prompts
        kind, batch = OnlineDPOConfig, work.micro // work.group
        settings = {"max_new_tokens": work.new_tokens, "max_length": None, "temperature": 1.0, **settings}
    args = kind(
        tempfile.mkdtemp(prefix="trl-benchmark-"),
        max_steps=steps,
        num_generations=work.group,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=work.prompts * work.group // work.micro,
        max_completion_length=work.new_tokens,
        max_prompt_length=None,
        beta=BETA[work.method],
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        shuffle_dataset=False,
        logging_steps=10,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=work.device == "cpu",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
    if not work.stops:
        tokenizer.eos_token = model.config.eos_token_id = None  # completions of full length
    rows = Dataset.from_dict({"input_ids": work.rows})
    given = {"args": args, "train_dataset": rows, "processing_class": tokenizer}
    make = OnlineDPOTrainer if work.method == "online-dpo" else GRPOTrainer
    trainer = make(model, reward_funcs=even_tokens, **given)
    trainer.remove_callback(PrinterCallback)
    return trainer


class Phases:
    """Splits a trainer's steps by phase; what is not spent in the others is its update."""

    def __init__(self, trainer: Any, device: str) -> None:
        self.device, self.spent = device, Spent(device=device)
        self._time(trainer.rollouts, "complete", "generate")
        self._time(trainer.rollouts.rewards, "score", "score")
        self._time(trainer.rollouts, "apply_rewards", "score")
        self._time(trainer, "scored", "score")

    def _time(self, part: Any, method: str, phase: str) -> None:
        inner: Callable[..., Any] = getattr(part, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.spent.phase(phase):
                return inner(*args, **kwargs)

        setattr(part, method, timed)

    def start(self) -> None:
        """A step begins."""
        self.spent, self._started = Spent(device=self.device), now(self.device)

    def stop(self, tokens: int) -> Spent:
        """It has ended."""
        spent = self.spent
        spent.seconds["update"] = now(self.device) - self._started - spent.total
        spent.tokens = tokens
        return spent


# ---- prompts


def prompts_of(corpus: Corpus, *, questions: int, count: int) -> list[list[int]]:
    """Questions of GSM8K, each behind `questions` - 1 others with their answers."""
    rows, found, shots = corpus.rows, [], questions - 1
    for number in range(count):
        first = number * questions
        before = [row["input_ids"] for row in rows[first : first + shots]]
        last = rows[first + shots]
        question = last["input_ids"][: last["completion_mask"].index(1)]
        found.append([token for ids in before for token in ids] + question)
    return found
