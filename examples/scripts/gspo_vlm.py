"""GSPO for a vision-language model: grpo_vlm.py with one importance ratio for each completion.

    accelerate launch examples/scripts/gspo_vlm.py --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct \
        --dataset_name lmms-lab/multimodal-open-r1-8k-verified --output_dir runs/gspo-vlm --learning_rate 1e-5 \
        --dtype bfloat16 --max_completion_length 1024 --use_peft --lora_target_modules q_proj v_proj --log_completions

Data, rewards and `--tiny` are those of grpo_vlm.py.
"""

from grpo_vlm import train

from trl import GRPOConfig, GRPOTrainer

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
