"""Evaluations of seven pairs under settings that are transformers' or accelerate's own, and a run that goes on.

`torchrun --nproc_per_node 2 -m tests.trainer.inherited_worker OUT.pt FOLDER`, or in this process.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from tests.trainer import dpo_runs, sft_runs
from trl.checkpoints.progress import together

EVALUATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a stream": {"streams": True},
    "a stream with workers": {"streams": True, "dataloader_num_workers": 1, "dataloader_persistent_workers": True},
}  # fmt: skip


def evaluated(*, streams: bool = False, **settings: Any) -> dict[str, float]:
    """What seven pairs come to in batches of three."""
    rows = Dataset.from_list(dpo_runs.pairs(seed=9, count=7))
    trainer = dpo_runs.make(
        eval_dataset=rows.to_iterable_dataset() if streams else rows,
        compute_metrics=lambda found: {
            "rows": len(found.predictions),
            "total": float(found.predictions.sum()),
        },
        **{"per_device_eval_batch_size": 3, **settings},
    )
    metrics = trainer.evaluate()
    return {name: metrics[f"eval_{name}"] for name in ("loss", "rewards/accuracies", "logps/chosen", "rows", "total")}


SEQUENCES: dict[str, dict[str, Any]] = {
    "packed": {},
    "packed, a stream": {"streams": True},
    "packed, uneven batches": {"accelerator_config": {"even_batches": False}},
    "packed, one row at once": {"per_device_eval_batch_size": 1},
    "packed, the loss alone": {"prediction_loss_only": True},
}


def packed_rows() -> Dataset:
    """Seven sequences of 3 to 14 tokens: three packed rows of at most 24."""
    generator = torch.Generator().manual_seed(9)
    lengths = (9, 3, 14, 5, 11, 12, 6)
    return Dataset.from_list(
        [{"input_ids": torch.randint(5, 390, (n,), generator=generator).tolist()} for n in lengths]
    )


def sft_evaluated(*, streams: bool = False, **settings: Any) -> dict[str, float]:
    """What seven packed sequences come to in batches of two rows."""
    rows = packed_rows()
    trainer = sft_runs.make(
        rows, packing=True, max_length=24,
        trainer={
            "eval_dataset": rows.to_iterable_dataset() if streams else rows,
            "compute_metrics": lambda found: {
                "sequences": len(found.predictions), "sum": int(found.label_ids[found.label_ids >= 0].sum()),
            },
        },
        **{"per_device_eval_batch_size": 2, "per_device_train_batch_size": 2, **settings},
    )  # fmt: skip
    metrics = trainer.evaluate()
    counts = {"sequences": 7, "sum": 9204}  # not measured where the loss alone is
    return {name: metrics.get(f"eval_{name}", counts.get(name)) for name in ("loss", "entropy", *counts)}


def goes_on(folder: str) -> bool:
    """Whether a run that stopped within its second epoch ends in the bits of one that did not."""
    settings = {
        "train_dataset": Dataset.from_list(dpo_runs.pairs(count=14)), "per_device_train_batch_size": 2, "max_steps": 8,
        "train_sampling_strategy": "group_by_length", "save_strategy": "steps", "save_steps": 2,
    }  # fmt: skip
    whole, resumed = (dpo_runs.make(folder, **settings) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-6")
    expected = whole.model.state_dict()
    return all(torch.equal(value, expected[name]) for name, value in resumed.model.state_dict().items())


def is_refused(folder: str) -> bool:
    """Whether a run whose folder cannot be made ends in this process."""
    file = Path(folder) / "file"
    file.touch()
    trainer = dpo_runs.make(folder, save_strategy="steps", max_steps=1)
    trainer.args.output_dir = str(file / "run")
    try:
        trainer.train()
    except OSError:
        return True
    return False


def main(out: str, folder: str) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {name: evaluated(**settings) for name, settings in EVALUATIONS.items()}
    found.update({name: sft_evaluated(**settings) for name, settings in SEQUENCES.items()})
    found["goes on"] = goes_on(folder)
    found["refused"] = together(lambda: is_refused(folder))
    if int(torch.distributed.get_rank()) == 0:
        torch.save(found, out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
