"""A batch of PPO written by hand, and ours: answer prompts, judge the answers, learn from them for some epochs.

`PaddedPPO` is the usual short loop: `model.generate`, then prompts and answers in padded rows, logits at every position of
policy and reference, values of a sequence classifier at every position. It knows nothing of `trl`.
"""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from benchmarks.group_loops import Completed, PaddedGRPO, Spent, Work, even_tokens, padded_logps
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback

KL_COEF, LAM, CLIP, CLIP_VALUE, VF_COEF = 0.05, 0.95, 0.2, 0.2, 0.1


class Rolled(NamedTuple):
    """What is known of the answers' tokens before the first update, each `(B, T)`."""

    logps: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


class PaddedPPO(PaddedGRPO):
    """A policy, its frozen reference and a value model, fused AdamW over both, clipping of the gradient.

    Prompts are answered as `PaddedGRPO` completes them, once each.
    """

    def __init__(self, model: PreTrainedModel, value_model: PreTrainedModel, work: Work, epochs: int) -> None:
        super().__init__(model, work)
        self.value_model, self.epochs = copy.deepcopy(value_model), epochs
        self.trained = [*self.model.parameters(), *self.value_model.parameters()]
        self.optimizer = torch.optim.AdamW(self.trained, lr=work.learning_rate, weight_decay=0.0, fused=True)

    def step(self, prompts: list[list[int]]) -> Spent:
        """Answer, judge and learn."""
        spent = Spent(device=self.work.device)
        with spent.phase("generate"):
            found = self.generate(prompts)
        with spent.phase("score"):
            rolled = self.rolled(found)
        with spent.phase("update"):
            self.update(found, rolled)
        spent.tokens = int(found.completion.sum())
        return spent

    @torch.no_grad()
    def rolled(self, found: Completed) -> Rolled:
        """Old log-probs and values, rewards with the KL's price, advantages (whitened) and returns."""
        parts, mask = self.parts(found), found.completion[:, found.width :]
        logps, values, ref = (
            torch.cat(columns)
            for columns in zip(*((padded_logps(self.model, p), self.values(p), self.reference_logps(p)) for p in parts), strict=True)
        )  # fmt: skip
        rewards = -KL_COEF * (logps - ref)
        rewards[torch.arange(len(mask)), mask.sum(1) - 1] += torch.tensor(even_tokens(found.lists))
        advantages, following, carried = torch.zeros_like(values), values[:, 0] * 0, values[:, 0] * 0
        for step in reversed(range(mask.shape[1])):
            own = mask[:, step]
            carried = (rewards[:, step] + following - values[:, step] + LAM * carried) * own
            advantages[:, step], following = carried, values[:, step] * own
        real = advantages[mask.bool()]
        whitened = (advantages - real.mean()) * torch.rsqrt(real.var() + 1e-8)
        return Rolled(logps, values, whitened * mask, advantages + values)

    def values(self, part: Completed) -> Tensor:
        """The value before each answer token, from the classifier's head at every position."""
        model: Any = self.value_model
        positions = (part.mask.cumsum(1) - 1).clamp(min=0)
        hidden = model.base_model(part.ids, attention_mask=part.mask, position_ids=positions, use_cache=False)
        return model.score(hidden.last_hidden_state)[:, part.width - 1 : -1, 0]

    def update(self, found: Completed, rolled: Rolled) -> None:
        """`epochs` optimiser steps, each over all micro-batches."""
        tokens, size = found.completion.sum(), self.work.micro
        for _ in range(self.epochs):
            for number, part in enumerate(self.parts(found)):
                old = Rolled(*(column[number * size : (number + 1) * size] for column in rolled))
                (self.losses(part, old).sum() / tokens).backward()
            torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def losses(self, part: Completed, old: Rolled) -> Tensor:
        """The clipped losses of policy and value function per token, `(B, T)`, 0 behind an answer's end."""
        ratio = torch.exp(padded_logps(self.model, part) - old.logps)
        policy = torch.maximum(-old.advantages * ratio, -old.advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
        values = self.values(part)
        near = old.values + (values - old.values).clamp(-CLIP_VALUE, CLIP_VALUE)
        value = torch.maximum((values - old.returns).square(), (near - old.returns).square()) / 2
        return (policy + VF_COEF * value) * part.completion[:, part.width :]


def make_ppo_trainer(
    model: PreTrainedModel,
    value_model: PreTrainedModel,
    work: Work,
    tokenizer: PreTrainedTokenizerBase,
    *,
    batches: int,
    epochs: int,
    **given: Any,
) -> Any:
    """`trl.experimental.ppo.PPOTrainer` with the same settings; `given` are further arguments of it."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    args = PPOConfig(
        tempfile.mkdtemp(prefix="trl-benchmark-"),
        total_episodes=batches * work.prompts,
        per_device_train_batch_size=work.micro,
        gradient_accumulation_steps=work.prompts // work.micro,
        num_ppo_epochs=epochs,
        response_length=work.new_tokens,
        temperature=1.0,
        kl_coef=KL_COEF,
        lam=LAM,
        cliprange=CLIP,
        cliprange_value=CLIP_VALUE,
        vf_coef=VF_COEF,
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        logging_steps=10,
        num_sample_generations=0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=work.device == "cpu",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = Dataset.from_dict({"input_ids": work.rows})
    trainer = PPOTrainer(
        args, tokenizer, copy.deepcopy(model), None, None, rows, copy.deepcopy(value_model), reward_funcs=even_tokens, **given
    )  # fmt: skip
    trainer.rollouts.sampling = replace(trainer.sampling, stop_token_ids=tuple(work.stops))
    trainer.remove_callback(PrinterCallback)
    return trainer
