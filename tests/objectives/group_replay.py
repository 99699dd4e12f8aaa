"""Whole training runs of the group methods in a bare loop over the objectives, for comparison with recorded ones."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl.objectives.group_advantages import (
    clipped_rewards,
    group_relative,
    leave_one_out,
    normalized,
    penalized,
    reward_statistics,
)
from trl.objectives.group_policy import (
    EXTREMES,
    GroupOptions,
    divisor_share,
    entropy_threshold,
    group_policy_loss,
    sequence_policy_loss,
)
from trl.objectives.group_ratios import GroupTokens
from trl.objectives.sampler_correction import correction, correction_extremes, correction_metrics
from trl.rewards.result import combine
from trl.tensors.ragged import Ragged
from trl.tensors.reduce import reduce_terms, where_counted
from trl.tensors.sequences import sum_by_sequence

OPTIONS = (
    "loss_type",
    "importance_sampling_level",
    "epsilon",
    "epsilon_high",
    "delta",
    "beta",
    "use_bias_correction_kl",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
)


class Replay:
    """One recorded case: fixed completions of a tiny model's prompts, `max_steps` steps of AdamW on all of them at once."""

    def __init__(self, case: dict, assets: Path, reward_funcs: dict, sampler=None) -> None:
        self.kwargs, self.family, self.sampler = case["kwargs"], case["family"], sampler
        self.tokenizer = AutoTokenizer.from_pretrained(assets / case["tok"])
        self.model = AutoModelForCausalLM.from_pretrained(assets / case["model"][1]).float()
        self.reference = AutoModelForCausalLM.from_pretrained(assets / case["model"][1]).float()
        lines = (assets / "datasets" / f"{case['dataset']}.jsonl").read_text().splitlines()
        self.rows = [json.loads(line) for line in lines][: case["rows"]]
        self.script = json.loads((assets / "scripts.json").read_text())[case["script"]]
        self.rewards = {name: reward_funcs[name] for name in case["rewards"]}
        beta = self.kwargs.get("beta", 0.0 if self.family == "grpo" else 0.05)
        given = {name: self.kwargs[name] for name in OPTIONS if name in self.kwargs}
        self.options = GroupOptions(**{**given, "beta": beta})
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.kwargs["learning_rate"], eps=1e-4, weight_decay=0.0
        )

    def run(self) -> list[dict[str, float]]:
        """The logged numbers of each optimiser step."""
        passes, left = self.kwargs.get("num_iterations", 1), self.kwargs["max_steps"]
        steps: list[dict[str, float]] = []
        while len(steps) < left:
            window, logged = self.roll_out(len(steps) // passes)
            own = [self.step(window) for _ in range(min(passes, left - len(steps)))]
            steps += [{**logged, **own[0]}, *own[1:]]
        return steps

    def prompt_ids(self, row: dict) -> list[int]:
        if isinstance(row["prompt"], str):
            return self.tokenizer(row["prompt"])["input_ids"]
        text = self.tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def roll_out(self, number: int):
        size = self.kwargs["num_generations"]
        count = self.kwargs["per_device_train_batch_size"] // size
        indices = [(number * count + turn) % len(self.rows) for turn in range(count)]
        picked = [(index, turn) for index in indices for turn in range(size)]
        completions = Ragged.of([self.script[index][turn] for index, turn in picked])
        prompts = [self.prompt_ids(self.rows[index]) for index, _ in picked]
        tokens = {"prompts": prompts, "completions": completions, "sequence": completions.row_index}
        with torch.no_grad():
            old, _ = self.score(self.model, prompts, completions)
            ref, _ = self.score(self.reference, prompts, completions)
        mask = torch.ones_like(old)
        if self.kwargs.get("mask_truncated_completions"):
            whole = torch.tensor(
                [row[-1].item() == self.tokenizer.eos_token_id for row in completions.split()]
            )
            mask = whole[completions.row_index].float()
        tokens |= {"old": old, "ref": ref, "mask": mask}
        logged = self.judge(tokens, picked)
        if self.sampler is not None and self.kwargs.get("vllm_importance_sampling_correction", True):
            drawn = [
                self.sampler(prompts[i], completions.row(i).tolist(), *pick) for i, pick in enumerate(picked)
            ]
            names = ("mode", "cap")
            keys = {name: f"vllm_importance_sampling_{name}" for name in names}
            given = {name: self.kwargs[key] for name, key in keys.items() if key in self.kwargs}
            sampling = Ragged.of(drawn, dtype=torch.float32).values
            found = correction(old, sampling, mask, tokens["sequence"], len(completions), **given)
            tokens["correction"] = found.factors
            logged |= {name: value.mean for name, value in correction_metrics(found, mask).items()}
            logged |= correction_extremes(found, mask)
        return tokens, {name: float(value) for name, value in logged.items()}

    def judge(self, tokens: dict, picked: list) -> dict:
        """Rewards and advantages, into `tokens`; what is logged of them."""
        ids = [row.tolist() for row in tokens["completions"].split()]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        rows = [self.rows[index] for index, _ in picked]
        shown = texts if isinstance(rows[0]["prompt"], str) else [[{"content": text}] for text in texts]
        columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
        asked = {
            "prompts": [row["prompt"] for row in rows],
            "completions": shown,
            "completion_ids": ids,
            **columns,
        }
        scores = torch.tensor(
            [[float("nan") if x is None else x for x in reward(**asked)] for reward in self.rewards.values()]
        ).T.double()
        weights = self.kwargs.get("reward_weights", [1.0] * len(self.rewards))
        rewards = combine(scores, torch.tensor(weights, dtype=torch.float64))
        size, logged = self.kwargs["num_generations"], {}
        if self.family == "grpo":
            scale = {True: "group", False: "none"}.get(*[self.kwargs.get("scale_rewards", "group")] * 2)
            advantages = group_relative(rewards, size, scale=scale)
            stats = reward_statistics(rewards, size, scale=scale)
        else:
            gaps = where_counted(tokens["old"] - tokens["ref"], tokens["mask"])
            if self.options.beta:
                logged["kl"] = gaps.sum() / tokens["mask"].sum()
            rewards = clipped_rewards(rewards, self.kwargs.get("reward_clip_range"))
            kl = sum_by_sequence(gaps, tokens["sequence"], len(ids))
            rewards = penalized(rewards, kl, beta=self.options.beta)
            advantages = leave_one_out(rewards, size)
            advantages = normalized(advantages) if self.kwargs.get("normalize_advantages") else advantages
            stats = reward_statistics(rewards, size)
        tokens["advantages"] = advantages[tokens["sequence"]]
        return {**logged, **{name: value.mean for name, value in stats.items()}}

    def score(self, model, prompts, completions):
        """Log-probs of the completions' tokens and entropies at their positions, `(K,)` each."""
        logps, entropies = [], []
        for prompt, completion in zip(prompts, completions.split(), strict=True):
            ids = torch.cat([torch.tensor(prompt), completion])
            logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1] / self.kwargs["temperature"]
            logs = logits.log_softmax(-1)
            logps.append(logs.gather(1, completion[:, None])[:, 0])
            entropies.append(-(logs.exp() * logs).sum(-1).detach())
        return torch.cat(logps), torch.cat(entropies)

    def step(self, window: dict) -> dict[str, float]:
        logps, entropies = self.score(self.model, window["prompts"], window["completions"])
        old = (
            logps.detach()
            if self.family == "grpo" and self.kwargs.get("num_iterations", 1) == 1
            else window["old"]
        )
        mask, count = window["mask"], len(window["completions"])
        top, chosen = self.kwargs.get("top_entropy_quantile", 1.0), None
        if top < 1:
            chosen = entropies >= entropy_threshold(entropies, mask, top)
        tokens = GroupTokens(
            old,
            window["advantages"],
            mask,
            window["sequence"],
            count,
            window["ref"],
            window.get("correction"),
            chosen,
        )
        if self.family == "grpo":
            terms = group_policy_loss(logps, tokens, self.options, entropies=entropies)
            longest = self.kwargs["max_completion_length"]
            share = {"rollout_tokens": len(mask), "rollout_rows": count, "longest": longest}
            loss = reduce_terms(terms, divisor_share(self.options.loss_type, mask, count, **share))
        else:
            terms = sequence_policy_loss(logps, tokens, self.options, entropies=entropies)
            loss = reduce_terms(terms, count)
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        found = {name: float(value.mean) for name, value in terms.metrics.items()}
        extremes = {name: found[mean] for name, (mean, _) in EXTREMES.items() if mean in found}
        return {"loss_exact": loss.item(), "grad_norm": norm.item(), **found, **extremes}
