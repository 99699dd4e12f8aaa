"""Supervised fine-tuning of SmolVLM on chats with images: sft_vlm.py with settings for that model.

    accelerate launch examples/scripts/sft_vlm_smol_vlm.py --dataset_name HuggingFaceH4/llava-instruct-mix-vsft \
        --output_dir runs/smol-vlm --dtype bfloat16 --use_peft --lora_target_modules down_proj o_proj k_proj q_proj v_proj

`--tiny` trains a small LLaVA.
"""

from sft_vlm import train

if __name__ == "__main__":
    trainer = train(model_name_or_path="HuggingFaceTB/SmolVLM-Instruct")
