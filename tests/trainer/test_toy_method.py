"""A method of one's own without a change of the library: online DPO (Guo et al. 2024, arXiv:2402.04792).

Two completions of each prompt are generated and scored; DPO is trained with the better as chosen.
"""

import torch
from datasets import Dataset
from torch.nn.functional import logsigmoid

from tests.tiny import tiny_model
from tests.trainer.grpo_runs import SETTINGS, even_tokens, prompts
from tests.trainer.resume_worker import tokenizer
from trl import GRPOConfig
from trl.methods.online import GroupMethod
from trl.rollouts.experience import ADVANTAGE, REF, SCORES, TRAINED
from trl.tensors.reduce import LossTerms, weighted, where_counted
from trl.tensors.sequences import sum_by_sequence
from trl.trainer.online_trainer import OnlineTrainer


class OnlineDPOMethod(GroupMethod):
    """The advantage is 1 for the better of two completions, -1 for the other, and 0 for equal rewards."""

    def rewards_and_advantages(self, rows, group_size):
        first, second = rows[SCORES].view(-1, 2).unbind(dim=1)
        sign = (first - second).sign()
        return rows[SCORES], torch.stack([sign, -sign], dim=1).flatten()

    def objective(self, experience, scored, step):
        log_ratios = where_counted(scored.logps - experience.per_token[REF], experience.per_token[TRAINED])
        rows = sum_by_sequence(log_ratios, experience.completions.row_index, len(experience)).view(-1, 2)
        sign = experience.per_row[ADVANTAGE].view(-1, 2)[:, 0]
        margins = self.args.beta * sign * (rows[:, 0] - rows[:, 1])
        metrics = {"rewards/margins": weighted(margins.detach(), sign != 0)}
        return [LossTerms(-logsigmoid(margins), (sign != 0).to(margins.dtype), "pair", metrics)]

    def divisor(self, experience):
        return (experience.per_row[ADVANTAGE] != 0).sum() // 2


class OnlineDPOTrainer(OnlineTrainer):
    _name, _tag_names = "Online DPO", ["trl", "online-dpo"]
    method_type, config_type = OnlineDPOMethod, GRPOConfig


def make(folder, **settings) -> OnlineDPOTrainer:
    given = {**SETTINGS, "num_generations": 2, "num_generations_eval": 2, **settings}
    return OnlineDPOTrainer(
        tiny_model("gpt2", seed=given["seed"], dtype=torch.float64),
        even_tokens,
        GRPOConfig(str(folder), **given),
        train_dataset=prompts(),
        processing_class=tokenizer(),
    )


def mean_reward(trainer) -> float:
    """Of 64 completions of each prompt."""
    rows = prompts()["input_ids"]
    data = Dataset.from_dict({"input_ids": [list(row) for row in rows for _ in range(32)]})
    return trainer.evaluate(data)["eval_reward"]


def test_the_reward_rises(tmp_path):
    """From about 0.5 to above 0.8: the share of even tokens."""
    trainer = make(
        tmp_path, seed=0, max_steps=40, per_device_train_batch_size=16, learning_rate=1e-2, optim="adamw_torch", logging_steps=1000,
        per_device_eval_batch_size=64, max_completion_length=4,
    )  # fmt: skip
    before = mean_reward(trainer)
    trainer.train()
    assert before < 0.65
    assert mean_reward(trainer) > before + 0.2


def test_a_step_does_not_depend_on_how_it_is_cut(tmp_path):
    """One step on 8 pairs in one micro-batch or in four, by the weights after it: float64, to 1e-12."""
    found = []
    for size, count in ((16, 1), (4, 4)):
        trainer = make(tmp_path, max_steps=1, per_device_train_batch_size=size, gradient_accumulation_steps=count)
        start = {name: value.clone() for name, value in trainer.model.named_parameters()}
        trainer.train()
        found.append({name: value - start[name] for name, value in trainer.model.named_parameters()})
    assert any(change.abs().max() > 1e-6 for change in found[0].values())
    for name, change in found[0].items():
        torch.testing.assert_close(found[1][name], change, rtol=1e-9, atol=1e-12)
