r"""GRPO for a vision-language model, on problems with an image and a solution.

    accelerate launch examples/scripts/grpo_vlm.py --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct \
        --dataset_name lmms-lab/multimodal-open-r1-8k-verified --output_dir runs/grpo-vlm --learning_rate 1e-5 \
        --dtype bfloat16 --max_completion_length 1024 --use_peft --lora_target_modules q_proj v_proj --log_completions

Rows have `image` (or `images`), `problem` and `solution`; images over 512 pixels wide or high are left out. Rewards are those of
gspo.py: a thought in `<think>`, and the right answer. `--tiny` trains a small LLaVA that imitates guesses about colours.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

from datasets import load_dataset
from gspo import SYSTEM_PROMPT

from trl import (
    GRPOConfig,
    GRPOTrainer,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
)
from trl.rewards import accuracy_reward, think_format_reward
from trl.scripts.loading import model_init_kwargs

sys.path.append(str(Path(__file__).resolve().parents[1]))
import tiny

TINY = {
    "per_device_train_batch_size": 32,
    "num_generations": 8,
    "max_completion_length": 8,
    "learning_rate": 5e-4,
    "max_steps": 30,
}


def conversation(row: dict[str, Any]) -> dict[str, Any]:
    """A problem with its image as messages."""
    question = [{"type": "image", "text": None}, {"type": "text", "text": row["problem"]}]
    system = {"role": "system", "content": [{"type": "text", "text": SYSTEM_PROMPT}]}
    return {"prompt": [system, {"role": "user", "content": question}]}


def is_small(row: dict[str, Any]) -> bool:
    """Whether no image is over 512 pixels wide or high."""
    images = row["images"] if "images" in row else [row["image"]]
    return all(max(image.size) <= 512 for image in images)


def train(config_class: Any, trainer_class: Any, **defaults: Any) -> Any:
    """Read the command line, whose `defaults` these are, train, and save; returns the trainer."""
    parser = TrlParser((ScriptArguments, config_class, ModelConfig))
    parser.set_defaults(dataset_name="lmms-lab/multimodal-open-r1-8k-verified", **defaults)
    rows = partial(tiny.colours, system=SYSTEM_PROMPT)
    script_args, training_args, model_args = parser.parse_args_and_config(
        tiny.arguments(parser, rows, **TINY)
    )
    training_args.model_init_kwargs = model_init_kwargs(model_args, training_args.model_init_kwargs)
    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    wanted = {"image", "images", "prompt", "solution"}

    def prompts(split: str) -> Any:
        found = dataset[split].filter(is_small).map(conversation)
        return found.remove_columns([name for name in found.column_names if name not in wanted])

    trainer = trainer_class(
        model_args.model_name_or_path,
        reward_funcs=[think_format_reward, accuracy_reward],
        args=training_args,
        train_dataset=prompts(script_args.dataset_train_split),
        eval_dataset=prompts(script_args.dataset_test_split) if training_args.eval_strategy != "no" else None,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    return trainer


if __name__ == "__main__":
    trainer = train(GRPOConfig, GRPOTrainer)
