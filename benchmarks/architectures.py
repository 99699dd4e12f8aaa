"""A step of SFT and of GRPO with packed rows over the same step with padded rows, for models of many architectures.

python benchmarks/architectures.py --types lfm2 gpt_oss --grpo gpt_oss --steps 5
"""

import copy
import os
import random
import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Iterator
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import datasets
import torch
from benchmarks.data import GSM8K_LENGTHS, Corpus, made_up_corpus, word_tokenizer
from benchmarks.group_loops import Work, make_trainer, now, prompts_of
from benchmarks.measure import on_one_quiet_thread, trainer_settings
from benchmarks.tables import Result, table_row, write_figures
from benchmarks.variants import Recipe
from tests.architectures import CURRENT, FIELDS, MODEL_TYPES, SHARED
from tests.tiny_vision import tiny_image, tiny_processor, tiny_vision_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trl import SFTConfig, SFTTrainer
from trl.models import policy
from trl.models.scoring.causal import Scorer

VOCABULARY, TOLERANCE = 5000, 1e-3
# Over the fields of tests/architectures.py, where a config has them: real sizes of heads and windows, wider matrices.
LARGER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "max_position_embeddings": 4096, "initializer_range": 0.02, "hidden_size": 256,
    "intermediate_size": 704, "head_dim": 64, "sliding_window": 128, "attention_chunk_size": 128, "eos_token_id": 1,
    "moe_intermediate_size": 352, "intermediate_size_mlp": 704, "moe_shared_expert_intermediate_size": 352,
    "shared_expert_intermediate_size": 352, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "mamba_head_dim": 32, "ssm_state_size": 32, "chunk_size": 64, "global_head_dim": 128,
    "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 32,
}  # fmt: skip
TWICE = ("layer_types", "layers_block_type", "no_rope_layers", "num_hidden_layers")


def build(model_type: str) -> PreTrainedModel:
    """The decoder of tests/architectures.py with wider and twice as many layers."""
    fields = {**SHARED, **LARGER}
    known = AutoConfig.for_model(model_type).to_dict()
    own = {name: value for name, value in FIELDS[model_type].items() if name not in LARGER or value is None}
    fields = {**{name: value for name, value in fields.items() if name in known}, **own}
    if "qk_rope_head_dim" in known:
        fields["head_dim"] = LARGER["qk_rope_head_dim"]
    fields.update({name: 2 * fields[name] for name in TWICE if name in fields})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields), dtype=torch.float32)


def sft_trainer(model: PreTrainedModel, corpus: Corpus) -> Any:
    """Rows packed to 512 tokens, four packed rows a step."""
    settings = {**trainer_settings(Recipe(steps=100, batch_size=4), sequential=False), "max_length": 512}
    rows = datasets.Dataset.from_list(corpus.rows)
    return SFTTrainer(model, SFTConfig(**settings, packing=True), train_dataset=rows, processing_class=corpus.tokenizer)


def grpo_trainer(model: PreTrainedModel, corpus: Corpus, *, route: str) -> Any:
    """Eight completions, of 40 tokens in the mean, of each of four prompts; two groups a micro-batch."""
    work = Work(prompts_of(corpus, questions=1, count=64), 96, list(range(1, VOCABULARY // 40)), micro=16)
    trainer = make_trainer(model, work, word_tokenizer(), steps=100)
    trainer.engine.route = route
    return trainer


class Stepper:
    """Optimiser steps of a trainer without its loop: rollouts or packed rows, loss, gradient, AdamW.

    The learning rate is 0, so that both sides draw the same completions in all steps.
    """

    def __init__(self, trainer: Any, *, micro_batches: int) -> None:
        self.trainer, self.micro_batches = trainer, micro_batches
        self.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.0, fused=True)
        loader = trainer.get_train_dataloader()
        self.batches: Iterator[Any] = chain.from_iterable(repeat(loader))

    def step(self) -> tuple[float, float, float]:
        """CPU seconds until the batches are there (with rollouts) and of the rest, and the loss."""
        started = now("cpu")
        self.trainer.model.train()
        batches, count = self.trainer.get_batch_samples(self.batches, self.micro_batches, torch.device("cpu"))
        drawn, total = now("cpu"), 0.0
        for batch in batches:
            inputs = self.trainer._prepare_inputs(batch)
            loss = self.trainer.compute_loss(self.trainer.model, inputs, num_items_in_batch=count)
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.trainer.state.global_step += 1  # by which rollouts are made
        return drawn - started, now("cpu") - drawn, total


def compare(make: Any, model: PreTrainedModel, *, micro_batches: int, steps: int) -> Result | None:
    """Steps with packed and padded rows in turn, after one of each that does not count; None if the model is padded.

    Raises: ValueError if the first losses differ.
    """
    packed = make(copy.deepcopy(model), packed=True)
    if packed.scorer.fallbacks:
        return None
    with patch.object(policy, "language_scorer", partial(Scorer, packed=False)):
        padded = make(copy.deepcopy(model), packed=False)
    sides = [Stepper(packed, micro_batches=micro_batches), Stepper(padded, micro_batches=micro_batches)]
    first = [side.step()[2] for side in sides]
    if abs(first[0] - first[1]) > TOLERANCE:
        raise ValueError(f"the first losses must agree to {TOLERANCE}, got {first}. The layouts do different work.")
    spent: list[list[tuple[float, float, float]]] = [[], []]
    for number in range(steps):
        for side in (0, 1) if number % 2 else (1, 0):
            spent[side].append(sides[side].step())
    # Batches have more or less padding: all of them count, not the middle one.
    draws, rest = (tuple(fmean(step[part] for step in side) for side in spent) for part in (0, 1))
    gain = (draws[1] + rest[1]) / (draws[0] + rest[0])
    return {"drawing": draws, "rest": rest, "gain": gain, "steps": spent}


def image_trainer(model: PreTrainedModel, corpus: Corpus) -> Any:
    """Sixteen rows a step: a picture of 4 tokens, then a prompt and a completion as long as the corpus's."""
    rng = random.Random(0)
    words = ["sky", "blue", "three", "answer", "is", "the", "why", "one"]
    rows = []
    for row in corpus.rows:
        count = len(row["input_ids"]) // 2  # a word has about two tokens
        prompt = max(1, count - sum(row["completion_mask"]) // 2)
        text = rng.choices(words, k=count)
        rows.append(
            {
                "image": tiny_image(len(rows)),
                "prompt": "<image> " + " ".join(text[:prompt]),
                "completion": " " + " ".join(text[prompt:]),
            }
        )
    settings = {**trainer_settings(Recipe(steps=100, batch_size=16), sequential=False), "max_length": None}
    data = datasets.Dataset.from_list(rows)
    return SFTTrainer(model, SFTConfig(**settings), train_dataset=data, processing_class=tiny_processor())


def image_case(corpus: Corpus, steps: int) -> Result | None:
    """LLaVA with a decoder as wide as the others, and a tower of two small layers."""
    text = {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "head_dim": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 4096,
    }  # fmt: skip
    model = tiny_vision_model(tiny_processor(), text_config=text).train()
    return compare(lambda model, packed: image_trainer(model, corpus), model, micro_batches=1, steps=steps)


def sft_case(model_type: str, corpus: Corpus, steps: int) -> Result | None:
    return compare(
        lambda model, packed: sft_trainer(model, corpus), build(model_type),
        micro_batches=1, steps=steps,
    )  # fmt: skip


def grpo_case(model_type: str, corpus: Corpus, steps: int) -> Result | None:
    return compare(
        lambda model, packed: grpo_trainer(model, corpus, route="auto" if packed else "generate"), build(model_type),
        micro_batches=2, steps=steps,
    )  # fmt: skip


def parse() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--types", nargs="*", choices=MODEL_TYPES, default=["llama", "qwen3", *CURRENT])
    parser.add_argument("--grpo", nargs="*", choices=MODEL_TYPES, default=["llama", "gpt_oss", "lfm2", "gemma4_text"])
    parser.add_argument("--images", action=BooleanOptionalAction, default=True, help="also SFT of LLaVA with images")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each side, after one")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON to this file")
    return parser.parse_args()


def main() -> None:
    args = parse()
    on_one_quiet_thread()
    corpus = made_up_corpus(GSM8K_LENGTHS, max_length=512, rows=400, name="made-up rows as long as GSM8K's")
    print(f"torch {torch.__version__}, fp32, 1 thread; {corpus.describe()}\n")
    columns = ["model type", "method", "packed, CPU s", "padded, CPU s", "padded / packed"]
    print(table_row(columns), table_row(["---"] * len(columns)), sep="\n")
    results = []
    cases = [("SFT", model_type, partial(sft_case, model_type)) for model_type in args.types]
    cases += [("SFT", "llava, with images", image_case)] if args.images else []
    cases += [("GRPO", model_type, partial(grpo_case, model_type)) for model_type in args.grpo]
    for method, model_type, case in cases:
        result = case(corpus, args.steps)
        if result is None:
            print(table_row([model_type, method, "padded", "", ""]), flush=True)
            continue
        cells = [f"{sum(parts):.2f}" for parts in zip(result["drawing"], result["rest"], strict=True)]
        if method == "GRPO":
            parts = zip(cells, result["drawing"], result["rest"], strict=True)
            cells = [f"{total} ({draw:.2f} + {rest:.2f})" for total, draw, rest in parts]
        print(table_row([model_type, method, *cells, f"{result['gain']:.2f}"]), flush=True)
        results.append({"model_type": model_type, "method": method, **result})
    write_figures(results, args.out)


if __name__ == "__main__":
    main()
