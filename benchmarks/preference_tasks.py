"""The methods of the preference benchmark: rows, model, trainer, hand-written loops, and how much work there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.data import Corpus, Row
from benchmarks.measure import MakeLoop, trainer_settings
from benchmarks.pair_data import reward_rows, unpaired_rows
from benchmarks.preference_loops import (
    BETA,
    BareDPO,
    BareKTO,
    BareReward,
    PaddedDPO,
    PaddedKTO,
    PaddedReward,
    reference_of,
)
from benchmarks.throughput import operations, tree_operations
from benchmarks.variants import Recipe, build_model, build_reward_model
from datasets import Dataset
from transformers import PreTrainedModel, PrinterCallback

Operations = Callable[[Any, Sequence[Row]], tuple[float, float]]
"""(model config, rows of a batch) -> operations that our step needs, and that the padded loop spends."""


@dataclass(frozen=True, slots=True)
class Task:
    """One method, as `run_interleaved` and the measurement of memory take it."""

    rows: Callable[[Corpus], Corpus]
    build: Callable[[str, int], PreTrainedModel]
    make: Callable[..., Any]
    loops: Mapping[str, MakeLoop]
    operations: Operations
    has_logits: bool = True


def make_dpo(
    model: PreTrainedModel, corpus: Corpus, recipe: Recipe, *, sequential: bool = False, **settings: Any
) -> Any:
    """`DPOTrainer` with the settings of the recipe; `settings` are further ones of its config."""
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(**trainer_settings(recipe, sequential=sequential), **_UNCUT, beta=BETA, **settings)
    return _ready(DPOTrainer, model, corpus, args, ref_model=reference_of(model))


def make_reward(model: PreTrainedModel, corpus: Corpus, recipe: Recipe, *, sequential: bool = False) -> Any:
    """`RewardTrainer` with the settings of the recipe."""
    from trl.trainer.reward_config import RewardConfig
    from trl.trainer.reward_trainer import RewardTrainer

    args = RewardConfig(**trainer_settings(recipe, sequential=sequential))
    return _ready(RewardTrainer, model, corpus, args)


def make_kto(model: PreTrainedModel, corpus: Corpus, recipe: Recipe, *, sequential: bool = False) -> Any:
    """`KTOTrainer` with the settings of the recipe."""
    from trl.trainer.kto_config import KTOConfig
    from trl.trainer.kto_trainer import KTOTrainer

    args = KTOConfig(**trainer_settings(recipe, sequential=sequential), **_UNCUT, beta=BETA)
    return _ready(KTOTrainer, model, corpus, args, ref_model=reference_of(model))


_UNCUT: dict[str, Any] = {"max_prompt_length": None}  # the rows are cut already


def _ready(kind: Any, model: PreTrainedModel, corpus: Corpus, args: Any, **given: Any) -> Any:
    rows = Dataset.from_list(corpus.rows)
    trainer = kind(model, args=args, train_dataset=rows, processing_class=corpus.tokenizer, **given)
    trainer.remove_callback(PrinterCallback)
    return trainer


# ---- operations; a pass without gradient is a third of one with

_WITHOUT_GRADIENT = 1 / 3


def _rows(config: Any, lengths: Sequence[int], *, scored: bool = True) -> float:
    """Operations with gradient for rows padded to the longest."""
    width = max(lengths)
    return len(lengths) * operations(config, width, pairs=width**2, scored=width if scored else 0)


def _lengths(row: Row, *names: str) -> list[int]:
    return [len(row[name]) for name in names]


def dpo_operations(config: Any, rows: Sequence[Row]) -> tuple[float, float]:
    sizes = [_lengths(row, "prompt_input_ids", "chosen_input_ids", "rejected_input_ids") for row in rows]
    needed = sum(tree_operations(config, prompt, completions) for prompt, *completions in sizes)
    padded = _rows(config, [prompt + length for prompt, *both in sizes for length in both])
    return (1 + _WITHOUT_GRADIENT) * needed, (1 + _WITHOUT_GRADIENT) * padded


def reward_operations(config: Any, rows: Sequence[Row]) -> tuple[float, float]:
    needed, lengths = 0.0, []
    for row in rows:
        chosen, rejected = row["chosen_input_ids"], row["rejected_input_ids"]
        shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), 0)
        needed += tree_operations(config, shared, [len(chosen) - shared, len(rejected) - shared], scored=False)
        lengths += [len(chosen), len(rejected)]
    return needed, _rows(config, lengths, scored=False)


def kto_operations(config: Any, rows: Sequence[Row]) -> tuple[float, float]:
    names = ("prompt_input_ids", "completion_input_ids", "KL_completion_input_ids")
    sizes = [_lengths(row, *names) for row in rows]
    needed = sum(
        tree_operations(config, prompt, [own])
        + _WITHOUT_GRADIENT * (tree_operations(config, prompt, [own, other]) + tree_operations(config, prompt, [other]))
        for prompt, own, other in sizes
    )
    own = _rows(config, [prompt + length for prompt, length, _ in sizes])
    other = _rows(config, [prompt + length for prompt, _, length in sizes])
    return needed, own + _WITHOUT_GRADIENT * (own + 2 * other)


TASKS: dict[str, Task] = {
    "dpo": Task(
        lambda corpus: corpus,
        build_model,
        make_dpo,
        {"bare": BareDPO, "padded": PaddedDPO},
        dpo_operations,
    ),
    "reward": Task(
        reward_rows,
        build_reward_model,
        make_reward,
        {"bare": BareReward, "padded": PaddedReward},
        reward_operations,
        has_logits=False,
    ),
    "kto": Task(
        unpaired_rows,
        build_model,
        make_kto,
        {"bare": BareKTO, "padded": PaddedKTO},
        kto_operations,
    ),
}
