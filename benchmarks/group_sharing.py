"""What it is worth to run a prompt once for all completions of its group: our update with and without."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from benchmarks.data import word_tokenizer
from benchmarks.group_loops import Work, make_trainer, now
from benchmarks.prefix_sharing import Sharing, seconds_in_turn
from benchmarks.throughput import tree_operations

from trl.rollouts.experience import SAMPLING_LOGPS, STOPPED, Experience
from trl.tensors.ragged import Ragged

COMPLETION = 48


def time_sharing(ratio: int, model: Any, work: Work, *, steps: int, completion: int = COMPLETION) -> Sharing:
    """Updates on the same made-up completions in turn, after one that does not count.

    Raises: ValueError where the losses of a first update differ.
    """
    prompt = [3 + number % 4000 for number in range(ratio * completion)]
    work = replace(work, rows=[prompt], new_tokens=completion)
    trainers = {shared: _ready(copy.deepcopy(model), work, prefix_sharing=shared) for shared in (True, False)}
    window = _window(trainers[True], prompt, work, completion)
    seconds = seconds_in_turn(lambda shared, _: _update(trainers[shared], window, work.device), steps=steps)
    lengths = [completion] * work.group
    once = tree_operations(model.config, len(prompt), lengths)
    each = sum(tree_operations(model.config, len(prompt), [length]) for length in lengths)
    return Sharing(ratio, seconds, once / each)


def _ready(model: Any, work: Work, **settings: Any) -> Any:
    trainer = make_trainer(model, work, word_tokenizer(), steps=1, **settings)
    trainer.create_optimizer()
    return trainer


def _window(trainer: Any, prompt: list[int], work: Work, completion: int) -> Experience:
    """Made-up completions with what the reference and the sampler say of them, and advantages."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(3, 4000, (work.group, completion), generator=generator)
    experience = Experience(
        Ragged.of([prompt] * work.group),
        Ragged.of(drawn.tolist()),
        {SAMPLING_LOGPS: torch.full((drawn.numel(),), -8.5)},
        {STOPPED: torch.ones(work.group, dtype=torch.bool)},
    )
    trainer.rollouts.complete = lambda prompts, *, streams: experience
    rows = {"input_ids": [prompt] * work.group}
    experience = trainer.rollouts.roll_out(rows, streams=range(work.group))
    return trainer.advantages(trainer.scored(experience, learning=True))


def _update(trainer: Any, window: Experience, device: str) -> tuple[float, float]:
    """Seconds and loss of an update: collate, forward, backward, optimiser."""
    started = now(device)
    batch = trainer._prepare_inputs(trainer.micro_batch(window))
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return now(device) - started, loss.item()
