r"""GRPO for a vision-language model, on problems with an image and a solution.

    accelerate launch examples/scripts/grpo_vlm.py --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct \
        --dataset_name lmms-lab/multimodal-open-r1-8k-verified --output_dir runs/grpo-vlm --learning_rate 1e-5 \
        --dtype bfloat16 --max_completion_length 1024 --use_peft --lora_target_modules q_proj v_proj --log_completions

Rows have `image` (or `images`), `problem` and `solution`; images over 512 pixels wide or high are left out. A completion is rewarded
for a thought in `<think>`, and for the right answer in `\boxed` (math-verify: `pip install "trl[math]"`).
"""

from typing import Any

from datasets import load_dataset

from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.rewards import accuracy_reward, think_format_reward
from trl.scripts.loading import model_init_kwargs

SYSTEM_PROMPT = r"Think about the problem between <think> and </think>, then give the answer in \boxed{}."


def conversation(row: dict[str, Any]) -> dict[str, Any]:
    """A problem with its image as messages."""
    question = [{"type": "image", "text": None}, {"type": "text", "text": row["problem"]}]
    system = {"role": "system", "content": [{"type": "text", "text": SYSTEM_PROMPT}]}
    return {"prompt": [system, {"role": "user", "content": question}]}


def is_small(row: dict[str, Any]) -> bool:
    """Whether no image is over 512 pixels wide or high."""
    images = row["images"] if "images" in row else [row["image"]]
    return all(max(image.size) <= 512 for image in images)


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    parser.set_defaults(dataset_name="lmms-lab/multimodal-open-r1-8k-verified")
    script_args, training_args, model_args = parser.parse_args_and_config()
    training_args.model_init_kwargs = model_init_kwargs(model_args, training_args.model_init_kwargs)
    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    dataset = dataset.filter(is_small).map(conversation)
    columns = dataset[script_args.dataset_train_split].column_names
    dataset = dataset.select_columns([name for name in ("image", "images", "prompt", "solution") if name in columns])

    trainer = GRPOTrainer(
        model_args.model_name_or_path,
        reward_funcs=[think_format_reward, accuracy_reward],
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model()
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
