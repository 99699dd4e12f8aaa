"""Runs `trl quickstart`, `trl sft` and `trl grpo` as installed, on a tiny model and rows made here: `python .ci/try_commands.py`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["count", "the", "apples", "three", "four", "five", "six", "seven", "eight", "."]
COMMON = "--use_cpu true --max_steps 2 --per_device_train_batch_size 2 --report_to none --save_strategy no"
COMMANDS = {
    "quickstart": "--method grpo --max_steps 2",
    "sft": f"--model_name_or_path {{0}}/model --dataset_name {{0}}/texts.jsonl {COMMON}",
    "grpo": f"--model_name_or_path {{0}}/model --dataset_name {{0}}/prompts.jsonl --reward_funcs rewards.length "
    f"--num_generations 2 --max_completion_length 4 {COMMON}",
}


def write_inputs(folder: Path) -> None:
    """A two-layer model with a tokenizer of words, rows of text, prompts, and a reward function."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<end>", "<unknown>", *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unknown>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "model")
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(vocabulary), max_position_embeddings=64, pad_token_id=0, eos_token_id=1, **size)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    texts = [{"text": f"count the apples . {word} ."} for word in WORDS[3:-1]]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    (folder / "prompts.jsonl").write_text("\n".join([json.dumps({"prompt": "count the apples ."})] * 8))
    (folder / "rewards.py").write_text(
        "def length(completions, **columns):\n    return [float(len(text)) for text in completions]\n"
    )


def main() -> None:
    packages = ("trl", "torch", "transformers", "accelerate", "datasets")
    print(", ".join(f"{name} {version(name)}" for name in packages), flush=True)
    trl = Path(sys.executable).with_name("trl")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        for command, options in COMMANDS.items():
            line = [str(trl), command, *options.format(folder).split(), "--output_dir", str(folder / command)]
            run = subprocess.run(line, capture_output=True, text=True, cwd=folder)
            if run.returncode or "Traceback" in run.stderr:
                sys.exit(f"{run.stdout}\n{run.stderr}\ntrl {command} failed: {' '.join(line)}")
            assert list((folder / command).rglob("*.safetensors")), f"trl {command} saved no model"
            print(f"trl {command}: done", flush=True)


if __name__ == "__main__":
    main()
