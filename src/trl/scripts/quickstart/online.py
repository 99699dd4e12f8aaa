"""The last stage of methods that learn from the model's own answers, judged by the reward model."""

import importlib
import time
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from trl.scripts.quickstart.evaluation import MAX_ANSWER_TOKENS
from trl.scripts.quickstart.plot import Panel
from trl.scripts.quickstart.report import Shown
from trl.scripts.quickstart.stages import Context, StageResult
from trl.scripts.quickstart.training import common_settings, run_training


@dataclass(frozen=True)
class OnlineStage:
    """A trainer that lets the model answer the training problems and learns from the reward model's scores.

    `module` has the classes `trainer` and `config`; `settings` are what the config is given besides what all stages share;
    `reward` and `kl` are the names under which they are logged.
    """

    name: str
    module: str
    trainer: str
    config: str
    reward: str
    kl: str
    steps: int
    settings: tuple[tuple[str, Any], ...]

    @property
    def panel(self) -> Panel:
        """Reward and distance from the fine-tuned model, in training."""
        return Panel(
            title=f"{self.name}: learns from its own answers, by their reward",
            unit="mean score by the reward model",
            left={self.reward: "reward of sampled answers"},
            right={self.kl: "KL from sft"},
            right_unit="nats per answer",
            right_share=False,
        )

    def run(self, context: Context) -> StageResult:
        """Train, save, evaluate on held-out problems."""
        started = time.perf_counter()
        module = importlib.import_module(self.module)
        steps = common_settings(context, self.name, steps=self.steps)
        assert context.reward_model is not None, "the stage before trains it"
        prompts = [{"prompt": context.task.prompt_messages(problem)} for problem in context.task.problems]
        trainer = getattr(module, self.trainer)(
            model=context.policy,
            args=getattr(module, self.config)(**{**steps, **dict(self.settings)}),
            reward_funcs=context.reward_model,
            train_dataset=Dataset.from_list(prompts),
            processing_class=context.tokenizer,
        )
        shown = {self.reward: Shown("reward", "+.2f"), self.kl: Shown("KL", ".2f")}
        run_training(context, self.name, trainer, shown)
        return StageResult(
            stage=self.name,
            exact_match=context.evaluate(self.name),
            kl=context.kl_from("sft"),
            seconds=time.perf_counter() - started,
            steps=trainer.state.global_step,
            model_dir=str(context.folder(self.name)),
        )

    def restore(self, context: Context) -> None:
        """Load the trained model."""
        context.load_policy(self.name)


PPO = OnlineStage(
    name="ppo",
    module="trl.experimental.ppo",
    trainer="PPOTrainer",
    config="PPOConfig",
    reward="objective/scores",
    kl="objective/kl",
    steps=280,
    settings=(
        ("per_device_train_batch_size", 128),
        ("num_mini_batches", 2),
        ("num_ppo_epochs", 2),
        ("learning_rate", 6e-4),
        ("lr_scheduler_type", "linear"),
        ("kl_coef", 0.05),
        ("vf_coef", 0.1),
        ("temperature", 1.0),
        ("response_length", MAX_ANSWER_TOKENS),
        ("stop_token", "eos"),
        ("missing_eos_penalty", 1.0),
    ),
)
