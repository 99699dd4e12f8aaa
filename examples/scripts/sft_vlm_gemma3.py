"""Supervised fine-tuning of Gemma 3 on chats with one or several images each: sft_vlm.py with settings for that model.

    accelerate launch examples/scripts/sft_vlm_gemma3.py --dataset_name HuggingFaceH4/llava-instruct-mix-vsft \
        --output_dir runs/gemma3-vlm --dtype bfloat16 --use_peft --lora_target_modules all-linear

`--tiny` trains a small LLaVA on rows of two images.
"""

from functools import partial

from sft_vlm import tiny, train

if __name__ == "__main__":
    trainer = train(
        partial(tiny.colours, images=2),
        model_name_or_path="google/gemma-3-4b-it",
        attn_implementation="eager",
    )
