"""Small SFT trainers over the tiny tokenizer, and what their batches train, as text."""

import itertools
import tempfile
from typing import Any

import torch
from datasets import Dataset

from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from trl import SFTConfig, SFTTrainer

QUICK = {
    "report_to": "none", "use_cpu": True, "disable_tqdm": True, "gradient_checkpointing": False, "save_strategy": "no",
    "logging_steps": 1, "max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
    "lr_scheduler_type": "constant", "seed": 11,
}  # fmt: skip

USER = {"role": "user", "content": "What colour is the sky?"}
BLUE = {"role": "assistant", "content": "It is blue."}
AGAIN = {"role": "user", "content": "And then?"}
NEXT = {"role": "assistant", "content": "Look up."}


def config(folder: Any = None, **settings: Any) -> SFTConfig:
    """A config with the quick settings, `settings` winning over them."""
    return SFTConfig(str(folder or tempfile.mkdtemp()), **{**QUICK, **settings})


def model_for(tokenizer: Any = None, architecture: str = "llama", **overrides: Any) -> Any:
    """A tiny model with an embedding for each of the tiny tokenizer's 400 tokens."""
    size = 400 if tokenizer is None else len(tokenizer)
    return tiny_model(architecture, **{"vocab_size": size, "pad_token_id": 0, **overrides})


def make(
    rows: Any, *, model: Any = None, tokenizer: Any = None, folder: Any = None, trainer: Any = None, **settings: Any
) -> SFTTrainer:  # fmt: skip
    """A trainer on `rows`; `trainer` holds further arguments of its constructor."""
    tokenizer = tiny_tokenizer() if tokenizer is None else tokenizer
    data = Dataset.from_list(rows) if isinstance(rows, list) else rows
    model = model_for(tokenizer) if model is None else model
    args = config(folder, **settings)
    return SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer, **(trainer or {}))


def sequences(batch: dict[str, torch.Tensor]) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of each sequence of a batch of either layout, without padding."""
    if "attention_mask" in batch:
        lengths = batch["attention_mask"].sum(1).tolist()
        parts = zip(batch["input_ids"], batch["labels"], lengths, strict=True)
        return [(ids[:n].tolist(), labels[:n].tolist()) for ids, labels, n in parts]
    starts = [*(batch["position_ids"][0] == 0).nonzero()[:, 0].tolist(), batch["input_ids"].shape[1]]
    spans = list(itertools.pairwise(starts))
    return [(batch["input_ids"][0, a:b].tolist(), batch["labels"][0, a:b].tolist()) for a, b in spans]


def trained_spans(trainer: SFTTrainer, batch: dict[str, torch.Tensor] | None = None) -> list[list[str]]:
    """For each sequence of the first batch, sorted: the stretches of trained tokens as text.

    The first token of a sequence, which nothing predicts, is shown as trained where the second one is.
    """
    batch = next(iter(trainer.get_train_dataloader())) if batch is None else batch
    found = []
    for ids, labels in sequences(batch):
        if len(labels) > 1 and labels[1] != -100:
            labels[0] = ids[0]
        assert all(label in (-100, token) for label, token in zip(labels, ids, strict=True))
        spans, current = [], []
        for label in [*labels, -100]:
            if label != -100:
                current.append(label)
            elif current:
                spans.append(trainer.processing_class.decode(current))
                current = []
        found.append(spans)
    return sorted(found)


def logged(trainer: SFTTrainer, name: str) -> list[float]:
    """All logged values of a metric."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]
