"""Estimates the memory of training on one device, from a model's config. Nothing is loaded or downloaded.

    python examples/memory_table.py                          # the table of docs/guides/out_of_memory.md
    python examples/memory_table.py --model runs/model --tokens 8192
    MALLOC_MMAP_THRESHOLD_=65536 python examples/memory_table.py --measure    # a small run on a CPU, measured and estimated

The parts: weights, gradients and optimiser state (exact, counted on the meta device), and what grows with the tokens of a micro
batch (a formula, for decoders like Llama with gradient checkpointing). Not counted: the driver's context, fragmentation, reference
models, generation.
"""

import argparse
import ctypes
import gc
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    TrainerCallback,
)

from trl.tensors.heads import default_chunk_size

GIB = 2**30
NF4 = 0.5 + 4 / 64  # bytes of a weight: four bits, and a float32 scale for 64 weights
RANK = 16  # of LoRA, on all linear layers but the head


def qwen3(width: int, inner: int, layers: int, heads: int, *, tied: bool) -> Qwen3Config:
    """A model of the Qwen3 family, with 8 key-value heads of size 128."""
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=tied,
    )


def llama31(width: int, inner: int, layers: int, heads: int) -> LlamaConfig:
    """A model of the Llama 3.1 family, with 8 key-value heads of size 128."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )


MODELS: dict[str, PretrainedConfig] = {
    "Qwen3 0.6B": qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen3 1.7B": qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen3 4B": qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen3 8B": qwen3(4096, 12288, 36, 32, tied=False),
    "Qwen3 32B": qwen3(5120, 25600, 64, 64, tied=False),
    "Llama 3.1 8B": llama31(4096, 14336, 32, 32),
    "Llama 3.1 70B": llama31(8192, 28672, 80, 64),
}


class Counts(NamedTuple):
    """Numbers of weights."""

    layers: int  # matrices of the layers, which LoRA adapts and quantisation shrinks
    others: int  # embeddings, head, norms
    adapters: int  # of LoRA with `RANK`


class Way(NamedTuple):
    """Bytes of a weight in one way to train; `trained` includes gradient and optimiser state."""

    name: str
    layers: float
    others: float
    adapters: float = 0
    hidden: int = 2  # bytes of a number in the residual stream: float32 weights make it float32 under autocast
    copies: float = 0  # bytes of autocast's copy of a layer's weight


WAYS = (
    Way("float32", 16, 16, hidden=4, copies=2),
    Way("bf16+residual", 14, 14),
    Way("bf16+residual, 8-bit AdamW", 8, 14),
    Way("bfloat16", 8, 8),
    Way("LoRA", 2, 2, adapters=16),
    Way("QLoRA", NF4, 2, adapters=8),
)


def count(config: PretrainedConfig) -> Counts:
    """The weights of a model with this config."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = [
        module.weight.shape
        for module in model.modules()
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings()
    ]
    layers = sum(rows * columns for rows, columns in linear)
    return Counts(layers, model.num_parameters() - layers, RANK * sum(map(sum, linear)))


def state_bytes(counts: Counts, way: Way) -> float:
    """Weights, gradients and optimiser state."""
    return counts.layers * way.layers + counts.others * way.others + counts.adapters * way.adapters


def kept_bytes(config: PretrainedConfig, way: Way, tokens: int) -> float:
    """The inputs of all layers, which gradient checkpointing keeps."""
    return config.num_hidden_layers * config.hidden_size * way.hidden * tokens


def layer_bytes(config: PretrainedConfig, way: Way, tokens: int, *, computed: int = 2) -> float:
    """One layer in the backward pass, which computes it again; `computed`: bytes of a number in products.

    Two norms; queries, keys and values before and after rotation, the output of attention; four widths of the feed-forward part, two
    of them with their gradients.
    """
    width, inner = config.hidden_size, config.intermediate_size
    size = getattr(config, "head_dim", None) or width // config.num_attention_heads
    heads, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    return tokens * (6 * width * way.hidden + (4 * heads + 4 * keys + 6 * inner) * computed)


def logits_bytes(config: PretrainedConfig, tokens: int, device: str = "cuda") -> float:
    """Two buffers of a chunk of logits in float32."""
    rows = default_chunk_size(config.vocab_size, itemsize=4, device=torch.device(device))
    return 2 * 4 * config.vocab_size * min(rows, tokens)


def estimate(config: PretrainedConfig, way: Way, tokens: int, *, computed: int = 2, device: str = "cuda") -> float:
    """Bytes at the peak of a training run with bf16, gradient checkpointing and micro batches of `tokens`.

    The head's loss and the layers' backward pass follow each other; the head's gradient in float32 lasts through both.
    """
    counts = count(config)
    gradient = 0 if way.adapters else 4 * config.vocab_size * config.hidden_size
    phases = (layer_bytes(config, way, tokens, computed=computed), logits_bytes(config, tokens, device))
    copies = counts.layers * way.copies
    return state_bytes(counts, way) + copies + gradient + kept_bytes(config, way, tokens) + max(phases)


def shown(size: float) -> str:
    """Two significant digits below 10, else whole numbers."""
    return f"{size:,.0f}" if size >= 10 else f"{size:.2g}"


def table(models: dict[str, PretrainedConfig], tokens: int) -> str:
    """GiB by model and way to train, in Markdown; the last column is what 1,000 further tokens take under LoRA."""
    lines = [
        "| GiB | " + " | ".join(way.name for way in WAYS) + " | 1,000 tokens more |",
        "|---" * (len(WAYS) + 2) + "|",
    ]
    for name, config in models.items():
        sizes = [shown(estimate(config, way, tokens) / GIB) for way in WAYS]
        more = (kept_bytes(config, WAYS[4], 1000) + layer_bytes(config, WAYS[4], 1000)) / GIB
        lines.append(f"| {name} | " + " | ".join(sizes) + f" | {shown(more)} |")
    return "\n".join(lines)


# --- a measured run


class Peak(TrainerCallback):
    """The peak of resident memory over its level at the begin of training."""

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == 2:  # from here on with the optimiser's state
            gc.collect()
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")


def resident(name: str) -> int:
    """`VmRSS` (now) or `VmHWM` (the peak) of this process, in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def measure(tokens: int = 4096) -> None:
    """Train a Llama of 60 million weights in float32 on this CPU (Linux), and print measured and estimated growth."""
    from datasets import Dataset
    from examples.small_model import built_in, train_tokenizer

    from trl import SFTConfig, SFTTrainer

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )
    length = 512
    rows = Dataset.from_list([{"input_ids": [(7 * n + 3) % 600 for n in range(length)]}] * 64)
    tokenizer = train_tokenizer(built_in(), vocabulary=1000)
    gc.collect()
    before = resident("VmRSS")
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder,
            per_device_train_batch_size=tokens // length,
            gradient_accumulation_steps=2,
            max_steps=4,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            max_length=length,
        )
        model = AutoModelForCausalLM.from_config(config)
        trainer = SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer, callbacks=[Peak()])
        trainer.train()
    measured = resident("VmHWM") - before
    estimated = estimate(config, Way("float32", 16, 16, hidden=4), tokens, computed=4, device="cpu")
    print(f"measured {measured / 2**20:,.0f} MiB, estimated {estimated / 2**20:,.0f} MiB ", end="")
    print(f"({estimated / measured - 1:+.0%})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hub name of one model in place of the table's")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a micro batch (default: 4096)")
    parser.add_argument("--measure", action="store_true", help="train a small model and compare")
    args = parser.parse_args()
    if args.measure:
        measure(args.tokens)
    else:
        models = {args.model: AutoConfig.from_pretrained(args.model)} if args.model else MODELS
        print(table(models, args.tokens))


if __name__ == "__main__":
    main()
