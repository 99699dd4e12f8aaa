"""Stage 3: a reward model."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from trl.scripts.quickstart.plot import Panel
from trl.scripts.quickstart.report import Shown
from trl.scripts.quickstart.stages import Context, StageResult, write_pairs
from trl.scripts.quickstart.training import common_settings, run_training
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer

SHOWN = {"loss": Shown("loss", ".4f"), "accuracy": Shown("pair accuracy", ".1%")}

PANEL = Panel(
    title="reward: tells right answers from wrong ones",
    unit="nats per pair",
    left={"loss": "training loss"},
    right={"accuracy": "pair accuracy (training)"},
    right_unit="share of pairs",
)


@dataclass(frozen=True)
class RewardModel:
    """`RewardTrainer` on pairs of a right answer and a wrong one; the policy stays as it is.

    The reward model is the fine-tuned one with further layers on top: to check an answer is more than to give it.
    """

    name: str = "reward"
    steps: int = 400
    layers: int = 3
    batch_size: int = 128
    learning_rate: float = 1e-3
    panel: Panel = PANEL

    def run(self, context: Context) -> StageResult:
        """Make the pairs, train, save, evaluate on pairs of held-out problems."""
        started = time.perf_counter()
        write_pairs(context)
        rows = context.pair_rows("pairs")
        context.report.pairs(rows)
        trainer = RewardTrainer(
            model=self.build(context),
            args=self.config(context),
            train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(context.pair_rows("held_out_pairs")),
            processing_class=context.tokenizer,
        )
        run_training(context, self.name, trainer, SHOWN, answers=False)
        metrics: dict[str, Any] = trainer.evaluate()
        context.reward_model = trainer.model  # type: ignore[assignment]
        return StageResult(
            stage=self.name,
            pair_accuracy=metrics["eval_accuracy"],
            loss=context.curves[self.name]["loss"][-1][1],
            seconds=time.perf_counter() - started,
            steps=trainer.state.global_step,
            model_dir=str(context.folder(self.name)),
        )

    def restore(self, context: Context) -> None:
        """Load the reward model."""
        context.load_reward_model(self.name)

    def build(self, context: Context) -> PreTrainedModel:
        """The fine-tuned model with new layers and a score on top, random by the run's seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(context.seed)
            return AutoModelForSequenceClassification.from_pretrained(
                context.folder("sft"), num_labels=1, num_hidden_layers=self.layers
            )

    def config(self, context: Context) -> RewardConfig:
        """The whole configuration."""
        return RewardConfig(
            **common_settings(context, self.name, steps=self.steps),
            per_device_train_batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            lr_scheduler_type="cosine",
            center_rewards_coefficient=0.01,
        )
