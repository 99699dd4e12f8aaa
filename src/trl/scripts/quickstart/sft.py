"""Stage 2: supervised fine-tuning."""

import time
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback

from trl.scripts.quickstart.plot import Panel
from trl.scripts.quickstart.report import Report, Shown
from trl.scripts.quickstart.stages import Context, StageResult
from trl.scripts.quickstart.training import common_settings, run_training
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

SHOWN = {"loss": Shown("loss", ".4f"), "mean_token_accuracy": Shown("token accuracy", ".1%")}

PANEL = Panel(
    title="sft: imitates right answers",
    unit="nats per token",
    left={"loss": "training loss"},
    right={"mean_token_accuracy": "token accuracy"},
    right_unit="share of tokens",
)


@dataclass(frozen=True)
class SupervisedFineTuning:
    """`SFTTrainer` on the conversations, training on the assistant's tokens alone.

    It stops early on purpose: what it could still learn is what the later stages are to teach.
    """

    name: str = "sft"
    steps: int = 600
    enough_loss: float = 0.8  # nats per token
    batch_size: int = 64
    learning_rate: float = 3e-3
    panel: Panel = PANEL

    def run(self, context: Context) -> StageResult:
        """Fine-tune, save, evaluate."""
        started = time.perf_counter()
        trainer = SFTTrainer(
            model=context.policy,
            args=self.config(context),
            train_dataset=Dataset.from_list(context.task.train_rows()),
            processing_class=context.tokenizer,
            callbacks=[StopsWhenGoodEnough(self.enough_loss, context.report)],
        )
        run_training(context, self.name, trainer, SHOWN)
        return StageResult(
            stage=self.name,
            exact_match=context.evaluate(self.name),
            kl=0.0,
            loss=context.curves[self.name]["loss"][-1][1],
            seconds=time.perf_counter() - started,
            steps=trainer.state.global_step,
            model_dir=str(context.folder(self.name)),
        )

    def restore(self, context: Context) -> None:
        """Load the fine-tuned model."""
        context.load_policy(self.name)

    def config(self, context: Context) -> SFTConfig:
        """The whole configuration."""
        return SFTConfig(
            **common_settings(context, self.name, steps=self.steps),
            assistant_only_loss=True,
            per_device_train_batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            lr_scheduler_type="constant_with_warmup",
        )


class StopsWhenGoodEnough(TrainerCallback):
    """Ends the training as soon as a logged loss is below a bound."""

    def __init__(self, enough_loss: float, report: Report) -> None:
        self.enough_loss, self.report = enough_loss, report

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Look at the loss."""
        loss = (logs or {}).get("loss", float("inf"))
        if loss < self.enough_loss:
            control.should_training_stop = True
            self.report.say(
                f"step {state.global_step:>5}: loss {loss:.4f}. Stops here on purpose, the rest is left to the later stages."
            )
