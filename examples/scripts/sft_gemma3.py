"""Supervised fine-tuning of Gemma 3 on chats of text: the program of `trl sft` with settings for that model.

    accelerate launch examples/scripts/sft_gemma3.py --dataset_name open-r1/codeforces-cots --output_dir runs/gemma3 \
        --dtype bfloat16 --use_peft --lora_target_modules all-linear --packing true

`--tiny` trains a Gemma 3 of two layers and random weights on calm answers.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from trl.scripts.sft import main, make_parser

sys.path.append(str(Path(__file__).resolve().parents[1]))
import tiny


def small_gemma(folder: Path) -> dict[str, Any]:
    """Prompts with calm answers, and a small Gemma 3 in place of the usual model."""
    options = tiny.manners(folder)
    config = Gemma3TextConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    Gemma3ForCausalLM(config).save_pretrained(options["model_name_or_path"])
    return {**options, "column_mapping": "chosen=completion"}


if __name__ == "__main__":
    parser = make_parser()
    parser.set_defaults(model_name_or_path="google/gemma-3-4b-it", attn_implementation="eager")
    trainer = main(*parser.parse_args_and_config(tiny.arguments(parser, small_gemma)))
