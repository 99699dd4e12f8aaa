"""The peak of the bytes of live tensors over the steps of a real trainer with a tiny model on the CPU.

python -m tests.harnesses.live_peak [METHOD ...]     # all shapes, measured and planned
"""

import gc
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from examples.small_model import built_in, train_tokenizer
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

import trl
from trl import ModelConfig
from trl.experimental.ppo import PPOConfig, PPOTrainer
from trl.models.peft import get_peft_config
from trl.scripts.planning.live_bytes import LiveBytes
from trl.scripts.planning.plan import plan_of
from trl.scripts.planning.run import Run, meta_model, weights_dtype
from trl.scripts.planning.state import Sharding
from trl.scripts.training import COMMANDS
from trl.trainer.grpo_config import RolloutTraining

WORDS = ("apples", "the", "of", "and")  # a token each
METHODS = ("sft", "dpo", "grpo", "rloo", "reward", "gkd", "distillation", "online-dpo", "ppo")


def llama(vocabulary: int, width: int, layers: int, **fields: Any) -> LlamaConfig:
    """A model of four heads, and keys of two."""
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=5 * width // 2, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, eos_token_id=1, **fields,
    )  # fmt: skip


class Shape(NamedTuple):
    """A model, the length of its rows, and settings of the run."""

    config: PretrainedConfig
    length: int
    args: dict[str, Any]
    model: Mapping[str, Any] = MappingProxyType({})


LORA = {"use_peft": True, "lora_target_modules": "all-linear", "lora_r": 8}
QWEN = Qwen3Config(
    vocab_size=2048, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, eos_token_id=1,
)  # fmt: skip
SHAPES = {
    "deep": Shape(llama(1024, 64, 4), 32, {"per_device_train_batch_size": 4}),
    "wide": Shape(llama(1024, 256, 2), 48, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
    "vocabulary": Shape(llama(16384, 64, 2, tie_word_embeddings=True), 96, {"per_device_train_batch_size": 4}),
    "kept": Shape(llama(2048, 96, 3), 128, {"per_device_train_batch_size": 4, "gradient_checkpointing": False}),
    "lora": Shape(llama(2048, 128, 3), 48, {"per_device_train_batch_size": 4, "bf16": True}, LORA),
    "half": Shape(QWEN, 64, {"per_device_train_batch_size": 8, "weights": "bf16+residual"}),
}


def run_of(method: str, shape: Shape, folder: str) -> Run:
    """Two steps with this shape."""
    half, rows = shape.length // 2, shape.args["per_device_train_batch_size"]
    fixed = {"max_steps": 2, "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    fixed |= {"learning_rate": 1e-4, **shape.args}
    frozen = {}
    kind = PPOConfig if method == "ppo" else getattr(trl, f"{COMMANDS[method].prefix}Config")
    samples = issubclass(kind, RolloutTraining)
    if "teacher_top_k" in kind.__dataclass_fields__:
        frozen = {"teacher": llama(shape.config.vocab_size, 128, 4)}
    halves = dict.fromkeys(("max_prompt_length", "max_completion_length"), half)
    fixed |= halves if samples else {"max_length": shape.length}
    if method in ("grpo", "rloo"):
        fixed |= {"num_generations": rows, "beta": 0.04 if shape.model or rows == 4 else 0.0}
    if method == "ppo":
        del fixed["max_length"]
        fixed |= {"response_length": half, "num_ppo_epochs": 1}
    if method == "dpo":
        fixed |= {"max_prompt_length": half}
    if method == "gkd":
        fixed |= {"max_new_tokens": half, "lmbda": 1.0 if shape.model else 0.0}
    args: Any = kind(folder, **fixed)
    return Run(method, shape.config, args, ModelConfig("model", **shape.model), Sharding(), frozen)


def with_numbers(config: PretrainedConfig, dtype: torch.dtype, classifier: Any = None) -> Any:
    """A model with this config, or a classifier of this kind."""
    model = meta_model(config, dtype, classifier).to_empty(device="cpu")
    model.init_weights()
    return model


@cache
def tokenizer() -> Any:
    """With fewer tokens than the models."""
    return train_tokenizer(built_in(), vocabulary=512)


def _numbers(completions: list[str], **_: object) -> list[float]:
    return [number % 3.0 for number in range(len(completions))]


def live_peak(run: Run) -> float:
    """The most bytes in the run; rows have the run's greatest lengths."""
    prompt, completion = run.lengths
    tokens = [9] * run.lengths.row
    others: dict[str, Any] = {}
    row: dict[str, Any] = {"input_ids": tokens}
    if run.samples:
        others = {"reward_funcs": _numbers} if run.method != "distillation" else {}
    elif run.method == "reward":
        row = {"chosen_input_ids": tokens, "rejected_input_ids": [*tokens[:prompt], 8, *tokens[prompt + 1 :]]}
    elif run.method == "gkd":
        row |= {
            "completion_mask": [int(vars(run.args)["lmbda"] == 0 or place >= prompt) for place in range(len(tokens))]
        }
    elif run.method == "dpo":
        row = {"prompt_input_ids": tokens[:prompt]}
        row |= dict.fromkeys(("chosen_input_ids", "rejected_input_ids"), tokens[:completion])
    if "teacher" in run.frozen:
        others["teacher_model"] = with_numbers(run.frozen["teacher"], torch.float32)
    rows = [row] * 16
    if run.samples:  # equal prompts are laid out once
        rows = [{"prompt": " ".join([*pair, *[WORDS[0]] * (prompt - 2)])} for pair in product(WORDS, WORDS)]
    dtype = weights_dtype(run.config, run.args, run.model_args)
    kind = PPOTrainer if run.method == "ppo" else getattr(trl, f"{COMMANDS[run.method].prefix}Trainer")
    trainer = kind(
        model=with_numbers(run.config, dtype, run.classifier), args=run.args, train_dataset=Dataset.from_list(rows),
        peft_config=get_peft_config(run.model_args), processing_class=tokenizer(), **others,
    )  # fmt: skip
    gc.collect()
    live = LiveBytes()
    for module in (trainer.model, getattr(trainer.reference, "module", None), others.get("teacher_model")):
        if isinstance(module, torch.nn.Module):
            live.add([*module.parameters(), *module.buffers()])
    with live:
        trainer.train()
    return max(map(sum, live.peaks.values()))


def main() -> None:
    for method in sys.argv[1:] or METHODS:
        for name, shape in SHAPES.items():
            with tempfile.TemporaryDirectory() as folder:
                run = run_of(method, shape, folder)
                planned, peak = plan_of(run), live_peak(run)
            error = planned.peak / peak - 1
            print(f"{method:12} {name:10} {peak / 1e6:8.2f} MB {error:+.2%}  {planned.phase}", flush=True)


if __name__ == "__main__":
    main()
