"""One optimiser step of every method of preferences, in this process or under torchrun.

`torchrun --nproc_per_node 2 -m tests.trainer.preference_worker OUT.pt '{"per_device_train_batch_size": 4}'`.
"""

import json
import sys
from typing import Any

import torch
from datasets import Dataset

from tests.trainer.preference_methods import METHODS


def main(out: str, settings: str) -> None:
    torch.set_num_threads(1)
    found = {}
    for name, (make, own) in METHODS.items():
        trainer = make(**{**own, **json.loads(settings)})
        trainer.train()
        found[name] = {"gradients": trainer.keep.steps, "log": trainer.state.log_history[0]}
        found[name]["eval"] = uneven_evaluation(trainer)
    if trainer.is_world_process_zero():
        torch.save(found, out)
    trainer.accelerator.end_training()


def uneven_evaluation(trainer: Any) -> dict[str, float]:
    """Metrics of seven rows: one is missing for two processes' whole batches."""
    seven = trainer.train_dataset.select(range(7))
    assert isinstance(seven, Dataset)
    metrics = trainer.evaluate(seven)
    return {
        name: value for name, value in metrics.items() if "runtime" not in name and "per_second" not in name
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
