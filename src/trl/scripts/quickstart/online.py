"""The last stage of methods that learn from the model's own answers, judged by the reward model or by whether they are right."""

import importlib
import time
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from trl.rewards.formats import content_of
from trl.scripts.quickstart.evaluation import MAX_ANSWER_TOKENS
from trl.scripts.quickstart.plot import Panel
from trl.scripts.quickstart.report import Shown
from trl.scripts.quickstart.stages import Context, StageResult, write_rows
from trl.scripts.quickstart.task import Task
from trl.scripts.quickstart.training import common_settings, run_training

PROMPTS_FILE = "prompts.jsonl"


def is_right(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """The reward of an answer: 1 for the right number and nothing else, 0 for any other."""
    said = [content_of(completion).strip() for completion in completions]
    return [float(text == right) for text, right in zip(said, answer, strict=True)]


@dataclass(frozen=True)
class Plotted:
    """A number that a trainer logs, and how it is shown."""

    name: str
    label: str
    unit: str
    short: str
    form: str = ".2f"


REWARD_MODEL_SCORE = Plotted(
    "objective/scores", "reward of sampled answers", "mean score by the reward model", "reward", "+.2f"
)
SHARE_OF_RIGHT = Plotted(
    "rewards/is_right/mean", "right answers among those sampled", "share of sampled answers", "right", ".1%"
)


@dataclass(frozen=True)
class OnlineStage:
    """A trainer that lets the model answer the training problems and learns from the answers' rewards.

    `module` has the classes `trainer` and `config`; `settings` are what the config is given besides what all stages share;
    `reward` and `beside` are what is shown of the training. Answers are judged by `is_right`, or, with `by_model`, by the
    reward model of the stage before.
    """

    name: str
    module: str
    trainer: str
    config: str
    reward: Plotted
    beside: Plotted
    steps: int
    settings: tuple[tuple[str, Any], ...]
    by_model: bool = False

    @property
    def panel(self) -> Panel:
        """Reward, and what is shown beside it, in training."""
        return Panel(
            title=f"{self.name}: learns from its own answers, by their reward",
            unit=self.reward.unit,
            left={self.reward.name: self.reward.label},
            right={self.beside.name: self.beside.label},
            right_unit=self.beside.unit,
            right_share=False,
        )

    def run(self, context: Context) -> StageResult:
        """Train, save, evaluate on held-out problems."""
        started = time.perf_counter()
        module = importlib.import_module(self.module)
        steps = common_settings(context, self.name, steps=self.steps)
        trainer = getattr(module, self.trainer)(
            model=context.policy,
            args=getattr(module, self.config)(**{**steps, **dict(self.settings)}),
            reward_funcs=context.reward_model if self.by_model else is_right,
            train_dataset=Dataset.from_list(self.prompts(context)),
            processing_class=context.tokenizer,
        )
        shown = {each.name: Shown(each.short, each.form) for each in (self.reward, self.beside)}
        run_training(context, self.name, trainer, shown)
        return StageResult(
            stage=self.name,
            exact_match=context.evaluate(self.name),
            kl=context.kl_from("sft"),
            seconds=time.perf_counter() - started,
            steps=trainer.state.global_step,
            model_dir=str(context.folder(self.name)),
        )

    def prompts(self, context: Context) -> list[dict[str, Any]]:
        """What is to be answered; for `is_right` with the right answers, and written down."""
        task, problems = context.task, context.task.problems
        if self.by_model:
            assert context.reward_model is not None, "the stage before trains it"
            return [{"prompt": task.prompt_messages(problem)} for problem in problems]
        rows = prompts_with_answers(task)
        write_rows(context.output_dir / PROMPTS_FILE, rows)
        return rows

    def restore(self, context: Context) -> None:
        """Load the trained model."""
        context.load_policy(self.name)


def prompts_with_answers(task: Task) -> list[dict[str, Any]]:
    """The training problems as rows for `is_right`."""
    return [
        {"prompt": task.prompt_messages(problem), "answer": task.answer(problem)} for problem in task.problems
    ]


GROUPS = (
    ("per_device_train_batch_size", 128),
    ("steps_per_generation", 2),
    ("num_generations", 8),
    ("max_completion_length", MAX_ANSWER_TOKENS),
    ("learning_rate", 5e-4),
    ("lr_scheduler_type", "linear"),
)

PPO = OnlineStage(
    name="ppo",
    module="trl.experimental.ppo",
    trainer="PPOTrainer",
    config="PPOConfig",
    reward=REWARD_MODEL_SCORE,
    beside=Plotted("objective/kl", "KL from sft", "nats per answer", "KL"),
    by_model=True,
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

GRPO = OnlineStage(
    name="grpo",
    module="trl.trainer.grpo_trainer",
    trainer="GRPOTrainer",
    config="GRPOConfig",
    reward=SHARE_OF_RIGHT,
    beside=Plotted("entropy", "entropy", "nats per token", "entropy"),
    steps=800,
    settings=GROUPS,
)

RLOO = OnlineStage(
    name="rloo",
    module="trl.trainer.rloo_trainer",
    trainer="RLOOTrainer",
    config="RLOOConfig",
    reward=SHARE_OF_RIGHT,
    beside=Plotted("kl", "KL from sft", "nats per token", "KL"),
    steps=800,
    settings=GROUPS,
)
