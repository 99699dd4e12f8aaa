"""RLOO for a vision-language model, on problems with an image and a solution.

    accelerate launch examples/scripts/rloo_vlm.py --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct \
        --dataset_name lmms-lab/multimodal-open-r1-8k-verified --output_dir runs/rloo-vlm --learning_rate 1e-5 \
        --dtype bfloat16 --max_completion_length 1024 --use_peft --lora_target_modules q_proj v_proj --log_completions

Data, rewards and `--tiny` are those of grpo_vlm.py. Images soon reach the default `max_prompt_length` of RLOO, so there is none.
"""

from grpo_vlm import train

from trl import RLOOConfig, RLOOTrainer

if __name__ == "__main__":
    trainer = train(RLOOConfig, RLOOTrainer, max_prompt_length=None)
