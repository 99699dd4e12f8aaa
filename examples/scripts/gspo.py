r"""Group sequence policy optimisation (GSPO): GRPO with one importance ratio for each completion, on problems with solutions.

    accelerate launch examples/scripts/gspo.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \
        --dataset_name AI-MO/NuminaMath-TIR --output_dir runs/gspo --max_completion_length 1024 --use_peft --log_completions

Rows have `problem` and `solution`. A completion is rewarded for a thought in `<think>`, and for the right answer in `\boxed`
(math-verify: `pip install "trl[math]"`).
"""

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

SYSTEM_PROMPT = r"Think about the problem between <think> and </think>, then give the answer in \boxed{}."


def conversation(row: dict[str, Any]) -> dict[str, Any]:
    """A problem as messages."""
    system = {"role": "system", "content": SYSTEM_PROMPT}
    return {"prompt": [system, {"role": "user", "content": row["problem"]}]}


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig))
    parser.set_defaults(
        dataset_name="AI-MO/NuminaMath-TIR",
        importance_sampling_level="sequence",
        loss_type="grpo",
        beta=0.0,
        epsilon=3e-4,
        epsilon_high=4e-4,
        steps_per_generation=4,
    )
    script_args, training_args, model_args, dataset_args = parser.parse_args_and_config()
    train_rows, eval_rows = load_inputs(script_args, training_args, model_args, dataset_args)

    trainer = GRPOTrainer(
        model_args.model_name_or_path,
        reward_funcs=[think_format_reward, accuracy_reward],
        args=training_args,
        train_dataset=train_rows.map(conversation),
        eval_dataset=eval_rows.map(conversation) if eval_rows is not None else None,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model()
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
