"""The peak of the bytes of live tensors over the steps of a real trainer with a tiny model on the CPU.

python -m tests.harnesses.live_peak [METHOD ...]     # all shapes, measured and planned
"""

import gc
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from examples.small_model import built_in, train_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, ModelConfig, SFTConfig, SFTTrainer
from trl.models.peft import get_peft_config
from trl.scripts.planning.live_bytes import LiveBytes
from trl.scripts.planning.plan import Run, plan_of
from trl.scripts.planning.policy import weights_dtype
from trl.scripts.planning.state import Sharding

WORD = "apples"  # one token


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
    "deep": Shape(llama(1024, 64, 6), 64, {"per_device_train_batch_size": 4}),
    "wide": Shape(llama(1024, 256, 2), 48, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
    "vocabulary": Shape(llama(16384, 64, 2, tie_word_embeddings=True), 96, {"per_device_train_batch_size": 4}),
    "kept": Shape(llama(2048, 96, 3), 128, {"per_device_train_batch_size": 4, "gradient_checkpointing": False}),
    "lora": Shape(llama(2048, 128, 3), 96, {"per_device_train_batch_size": 4, "bf16": True}, LORA),
    "half": Shape(QWEN, 64, {"per_device_train_batch_size": 8, "weights": "bf16+residual"}),
}


def run_of(method: str, shape: Shape, folder: str) -> Run:
    """Two steps with this shape."""
    half, rows = shape.length // 2, shape.args["per_device_train_batch_size"]
    fixed = {"max_steps": 2, "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    fixed |= {"learning_rate": 1e-4, **shape.args}
    args: Any
    if method == "grpo":
        limits = {"max_prompt_length": half, "max_completion_length": half, "num_generations": rows}
        args = GRPOConfig(folder, beta=0.04 if shape.model or rows == 4 else 0.0, **limits, **fixed)
    elif method == "dpo":
        args = DPOConfig(folder, max_length=shape.length, max_prompt_length=half, **fixed)
    else:
        args = SFTConfig(folder, max_length=shape.length, **fixed)
    return Run(method, shape.config, args, ModelConfig("model", **shape.model), Sharding())


@cache
def tokenizer() -> Any:
    """With fewer tokens than the models."""
    return train_tokenizer(built_in(), vocabulary=512)


def live_peak(run: Run) -> int:
    """The most bytes in the run; rows have the run's greatest lengths."""
    prompt, completion = run.lengths
    tokens = [9] * run.lengths.row
    kind: Any
    others: dict[str, Any] = {}
    if run.method == "sft":
        kind, row = SFTTrainer, {"input_ids": tokens}
    elif run.method == "dpo":
        kind, row = DPOTrainer, {"prompt_input_ids": tokens[:prompt]}
        row |= dict.fromkeys(("chosen_input_ids", "rejected_input_ids"), tokens[:completion])
    else:
        kind, row = GRPOTrainer, {"prompt": " ".join([WORD] * prompt)}
        others = {"reward_funcs": lambda completions, **_: [float(n % 3) for n in range(len(completions))]}
    model = AutoModelForCausalLM.from_config(run.config, dtype=weights_dtype(run.config, run.args, run.model_args))
    trainer = kind(
        model, args=run.args, train_dataset=Dataset.from_list([row] * 16), peft_config=get_peft_config(run.model_args),
        processing_class=tokenizer(), **others,
    )  # fmt: skip
    gc.collect()
    live = LiveBytes()
    for module in (trainer.model, getattr(trainer.reference, "module", None)):
        if isinstance(module, torch.nn.Module):
            live.add([*module.parameters(), *module.buffers()])
    with live:
        trainer.train()
    return max(peak.total for peak in live.peaks.values())


def main() -> None:
    for method in sys.argv[1:] or ("sft", "dpo", "grpo"):
        for name, shape in SHAPES.items():
            with tempfile.TemporaryDirectory() as folder:
                run = run_of(method, shape, folder)
                planned, peak = plan_of(run), live_peak(run)
            error = planned.peak / peak - 1
            print(f"{method:5} {name:10} {peak / 1e6:8.2f} MB {error:+.2%}  {planned.phase}", flush=True)


if __name__ == "__main__":
    main()
