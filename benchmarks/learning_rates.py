"""Held-out loss, accuracy or reward after a short run, for several learning rates: SFT with all weights and with LoRA, DPO, GRPO.

python benchmarks/learning_rates.py sft lora dpo grpo

The model (0.6 million weights) first learns word problems, steps and chats of `trl data`. Then each run starts from it: SFT teaches it
to answer chats in steps, DPO the better answers of the preferences, GRPO the form of solutions. One run per learning rate.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from datasets import DatasetDict, concatenate_datasets
from examples import small_model
from examples.gsm8k_rewards import in_form
from peft import LoraConfig
from transformers import PreTrainedTokenizerFast

from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer, make_data

RATES = {
    "sft": [1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2],
    "lora": [1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1],
    "dpo": [1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3],
    "grpo": [1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3],
}
SHARED: dict[str, Any] = {
    "per_device_train_batch_size": 16,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "logging_steps": 10,
    "disable_tqdm": True,
}


def problems() -> DatasetDict:
    return make_data("problems").rename_columns({"question": "prompt", "answer": "completion"})


def in_steps() -> DatasetDict:
    """Problems of another seed, answered in steps."""
    rows = make_data("steps", rows=800, seed=1).filter(lambda row: all(row["labels"]))
    return rows.map(lambda row: {"completion": " ".join(row["completions"])}).select_columns(["prompt", "completion"])


def as_chats(rows: DatasetDict) -> DatasetDict:
    return rows.map(
        lambda row: {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["completion"]},
            ]
        },
        remove_columns=["prompt", "completion"],
    )


def halves(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    """A chat as text: the first question, and what follows."""
    first = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    return {"prompt": first, "completion": whole.removeprefix(first)}


def start(folder: Path) -> Path:
    """A model that has seen every word: solutions, steps, and chats about the problems."""
    tokenizer = small_model.train_tokenizer(small_model.built_in(), vocabulary=4096)
    chats = make_data("chats")["train"].map(lambda row: halves(row["messages"], tokenizer))
    rows = [problems()["train"], in_steps()["train"], chats.select_columns(["prompt", "completion"])]
    model = small_model.small_llama(tokenizer, seed=0, layers=2, width=128)
    args = SFTConfig(str(folder / "warm"), learning_rate=3e-3, num_train_epochs=6, **SHARED)
    SFTTrainer(model, args, train_dataset=concatenate_datasets(rows), processing_class=tokenizer).train()
    model.save_pretrained(folder / "start")
    tokenizer.save_pretrained(folder / "start")
    return folder / "start"


def sft(model: Path, rate: float, folder: str, peft_config: LoraConfig | None = None) -> str:
    rows = as_chats(in_steps())
    args = SFTConfig(folder, learning_rate=rate, num_train_epochs=2, **SHARED)
    trainer = SFTTrainer(
        str(model), args, train_dataset=rows["train"], eval_dataset=rows["test"], peft_config=peft_config
    )
    trainer.train()
    return f"loss {trainer.evaluate()['eval_loss']:.3f}"


def lora(model: Path, rate: float, folder: str) -> str:
    peft_config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    return sft(model, rate, folder, peft_config)


def dpo(model: Path, rate: float, folder: str) -> str:
    rows = make_data("preferences")
    args = DPOConfig(folder, learning_rate=rate, num_train_epochs=2, **SHARED)
    trainer = DPOTrainer(str(model), None, args, train_dataset=rows["train"], eval_dataset=rows["test"])
    trainer.train()
    metrics = trainer.evaluate()
    names = ("loss", "rewards/accuracies", "rewards/margins", "logps/chosen")
    return ", ".join(f"{name} {metrics[f'eval_{name}']:.3f}" for name in names)


def grpo(model: Path, rate: float, folder: str) -> str:
    shared = {**SHARED, "per_device_train_batch_size": 64}
    args = GRPOConfig(folder, learning_rate=rate, max_steps=60, num_generations=8, max_completion_length=64, **shared)
    trainer = GRPOTrainer(str(model), in_form, args, train_dataset=problems()["train"])
    trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    return f"reward {logs[0]['reward']:.3f} -> {logs[-1]['reward']:.3f}, entropy {logs[-1]['entropy']:.3f}"


def main(methods: list[str]) -> None:
    with TemporaryDirectory() as folder:
        model = start(Path(folder))
        for method in methods:
            for rate in RATES[method]:
                run = f"{folder}/{method}-{rate}"
                try:
                    outcome = {"sft": sft, "lora": lora, "dpo": dpo, "grpo": grpo}[method](model, rate, run)
                except FloatingPointError as error:
                    outcome = str(error)
                print(f"{method} {rate:g}: {outcome}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:] or list(RATES))
