"""One optimiser step with tokens spread over processes: `-m tests.trainer.sequence_worker OUT.pt SP_SIZE CASES`.

CASES are names of `RUNS`, by commas. Process 0 writes what each of them gives; with SP_SIZE 1 in one process too.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.contracts import methods
from tests.tiny import tiny_model

# Four rows, in two micro-batches that train different numbers of tokens, of a step over eight.
CUT = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
ADAM = {"optim": "adamw_torch", "learning_rate": 1e-2, "adam_epsilon": 1e-4}


def grouped(key_heads: int) -> Any:
    """Four heads that share key heads, all in float64: no norm computes in float32."""
    fields = {"num_key_value_heads": key_heads, "sliding_window": 5 if key_heads == 1 else None}
    return tiny_model("starcoder2", dtype=torch.float64, **fields)


def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
    """A user's own: cross-entropy, and a little of its square."""
    logits, labels = outputs["logits"][:, :-1], labels[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
    return (losses + 0.1 * losses**2).sum() / num_items_in_batch


class Run(NamedTuple):
    """A method of `tests.contracts.methods`, its settings and the key heads of its model (None: the method's own)."""

    method: str
    settings: Mapping[str, Any] = {}
    key_heads: int | None = None
    evaluates: bool = False


RUNS = {
    "sft": Run("sft", evaluates=True),
    "sft-packed": Run("sft-padding-free", {"gradient_checkpointing": True}, 2),
    "sft-dft": Run("sft-dft", {}, 1),
    "sft-smoothed": Run("sft", {"label_smoothing_factor": 0.1}),
    "sft-own-loss": Run("sft", {"compute_loss_func": own_loss}),
    "sft-noise": Run("sft", {"neftune_noise_alpha": 5.0, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}),
    "reward": Run("reward", evaluates=True),
    "dpo": Run("dpo-sigmoid", evaluates=True),
    "aot": Run("dpo-aot"),
    "kto": Run("kto", evaluates=True),
    "bco": Run("bco-matched"),
}  # fmt: skip


class Found(NamedTuple):
    gradients: list[dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]
    logs: dict[str, float]
    evaluation: dict[str, float]


def run(name: str, sp_size: int, **settings: Any) -> Found:
    case = RUNS[name]
    model = {} if case.key_heads is None else {"model": grouped(case.key_heads)}
    torch.manual_seed(0)
    trainer = methods.trained(case.method, **{**CUT, **ADAM, **case.settings, **model, "sp_size": sp_size, **settings})
    weights = {key: value.detach().clone() for key, value in trainer.model.state_dict().items()}
    logs = {
        key: value for key, value in trainer.state.log_history[0].items() if not any(x in key for x in methods.CLOCKS)
    }
    rows = trainer.train_dataset.select(range(7))
    return Found(trainer.keep.steps, weights, logs, methods.metrics_of(trainer, rows) if case.evaluates else {})


def main(out: str, sp_size: str, cases: str) -> None:
    torch.set_num_threads(1)
    groups = int(os.environ["WORLD_SIZE"]) // int(sp_size)
    rows = {} if groups == 1 else {"per_device_train_batch_size": 4 // groups}
    found = {name: tuple(run(name, int(sp_size), **rows)) for name in cases.split(",")}
    if dist.get_rank() == 0:
        torch.save(found, out)
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
