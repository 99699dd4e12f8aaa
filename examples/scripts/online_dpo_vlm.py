r"""Online DPO for a vision-language model: the better and the worse of several answers to a problem with an image.

    accelerate launch examples/scripts/online_dpo_vlm.py --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct \
        --dataset_name lmms-lab/multimodal-open-r1-8k-verified --output_dir runs/online-dpo-vlm --learning_rate 1e-5 \
        --dtype bfloat16 --max_new_tokens 256 --max_length 1024 --use_peft --lora_target_modules q_proj v_proj

Rows and rewards are those of grpo_vlm.py. `--tiny` trains a small LLaVA that imitates guesses about colours.
"""

import grpo_vlm

from trl import OnlineDPOConfig, OnlineDPOTrainer

if __name__ == "__main__":
    grpo_vlm.TINY |= {"per_device_train_batch_size": 8, "num_generations": 4}
    trainer = grpo_vlm.train(OnlineDPOConfig, OnlineDPOTrainer)
