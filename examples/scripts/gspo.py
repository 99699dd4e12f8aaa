r"""Group sequence policy optimisation (GSPO): GRPO with one importance ratio for each completion, on problems with solutions.

    accelerate launch examples/scripts/gspo.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \
        --dataset_name AI-MO/NuminaMath-TIR --output_dir runs/gspo --max_completion_length 1024 --use_peft --log_completions

Rows have `problem` and `solution`. A completion is rewarded for a thought in `<think>`, and for the right answer in `\boxed`
(math-verify: `pip install "trl[math]"`). `--tiny` trains a small Llama that imitates guesses: it learns to think
first.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

from trl import (
    DatasetMixtureConfig,
    GRPOConfig,
    GRPOTrainer,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
)
from trl.rewards import accuracy_reward, think_format_reward
from trl.scripts.training import load_inputs

sys.path.append(str(Path(__file__).resolve().parents[1]))
import tiny

SYSTEM_PROMPT = r"Think about the problem between <think> and </think>, then give the answer in \boxed{}."
TINY = {
    "per_device_train_batch_size": 64,
    "num_generations": 8,
    "max_completion_length": 10,
    "learning_rate": 1e-3,
    "max_steps": 30,
}


def conversation(row: dict[str, Any]) -> dict[str, Any]:
    """A problem as messages."""
    system = {"role": "system", "content": SYSTEM_PROMPT}
    return {"prompt": [system, {"role": "user", "content": row["problem"]}]}


def train(config_class: Any, trainer_class: Any, **defaults: Any) -> Any:
    """Read the command line, whose `defaults` these are, train, and save; returns the trainer."""
    parser = TrlParser((ScriptArguments, config_class, ModelConfig))
    parser.set_defaults(dataset_name="AI-MO/NuminaMath-TIR", **defaults)
    given = tiny.arguments(parser, partial(tiny.solutions, system=SYSTEM_PROMPT), **TINY)
    script_args, training_args, model_args = parser.parse_args_and_config(given)
    train_rows, eval_rows = load_inputs(script_args, training_args, model_args, DatasetMixtureConfig())

    trainer = trainer_class(
        model_args.model_name_or_path,
        reward_funcs=[think_format_reward, accuracy_reward],
        args=training_args,
        train_dataset=train_rows.map(conversation),
        eval_dataset=eval_rows.map(conversation) if eval_rows is not None else None,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    return trainer


if __name__ == "__main__":
    trainer = train(
        GRPOConfig,
        GRPOTrainer,
        importance_sampling_level="sequence",
        loss_type="grpo",
        beta=0.0,
        epsilon=3e-4,
        epsilon_high=4e-4,
        steps_per_generation=4,
    )
