"""Last stage of `--method dpo`: direct preference optimisation."""

import time
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from trl.scripts.quickstart.plot import Panel
from trl.scripts.quickstart.report import Shown
from trl.scripts.quickstart.stages import Context, StageResult
from trl.scripts.quickstart.training import common_settings, run_training
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer

SHOWN = {"loss": Shown("loss", ".4f"), "rewards/accuracies": Shown("pair accuracy", ".1%")}

PANEL = Panel(
    title="dpo: prefers right answers, held against sft",
    unit="implicit reward (nats times beta)",
    left={"rewards/chosen": "right answers", "rewards/rejected": "wrong answers"},
    right={"rewards/accuracies": "pair accuracy (training)"},
    right_unit="share of pairs",
)


@dataclass(frozen=True)
class DirectPreferenceOptimisation:
    """`DPOTrainer` on the reward model's pairs, from the fine-tuned model, which is the reference too.

    The loss has a share of the right answers' likelihood (RPO): without it one seed of three learned to prefer the right
    answers, and to write neither them nor the wrong ones.
    """

    name: str = "dpo"
    steps: int = 400
    batch_size: int = 64
    learning_rate: float = 1e-3
    beta: float = 0.1
    rpo_alpha: float = 0.5  # weight of the right answers' likelihood
    panel: Panel = PANEL

    def run(self, context: Context) -> StageResult:
        """Train, save, evaluate on held-out problems and pairs of them."""
        started = time.perf_counter()
        trainer = DPOTrainer(
            model=context.policy,
            args=self.config(context),
            train_dataset=Dataset.from_list(context.pair_rows("pairs")),
            eval_dataset=Dataset.from_list(context.pair_rows("held_out_pairs")),
            processing_class=context.tokenizer,
        )
        run_training(context, self.name, trainer, SHOWN)
        metrics: dict[str, Any] = trainer.evaluate()
        return StageResult(
            stage=self.name,
            exact_match=context.evaluate(self.name),
            pair_accuracy=metrics["eval_rewards/accuracies"],
            kl=context.kl_from("sft"),
            loss=context.curves[self.name]["loss"][-1][1],
            seconds=time.perf_counter() - started,
            steps=trainer.state.global_step,
            model_dir=str(context.folder(self.name)),
        )

    def restore(self, context: Context) -> None:
        """Load the trained model."""
        context.load_policy(self.name)

    def config(self, context: Context) -> DPOConfig:
        """The whole configuration."""
        return DPOConfig(
            **common_settings(context, self.name, steps=self.steps),
            beta=self.beta,
            rpo_alpha=self.rpo_alpha,
            per_device_train_batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            lr_scheduler_type="cosine",
        )
