"""Six pairs scored by a reference in advance: what the tests of one process and of two have in common.

As a program, under torchrun: `-m tests.trainer.precompute_worker OUT BATCH_SIZE` writes `OUT/columns_<rank>.json`.
"""

import json
import sys
from pathlib import Path

import datasets.config
import torch
from accelerate import Accelerator
from datasets import Dataset

from tests.tiny import tiny_model
from trl.models.reference import FrozenModel
from trl.models.scoring.causal import Scorer
from trl.tensors.sequences import split_pairs, sum_by_sequence
from trl.trainer.precompute import ReferencePass, precompute_ref_log_probs

COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")


def pair_rows(count: int = 7) -> list[dict[str, list[int]]]:
    """Pairs of different lengths, fixed."""
    generator = torch.Generator().manual_seed(3)

    def ids(length: int) -> list[int]:
        return torch.randint(3, 90, (length,), generator=generator).tolist()

    return [
        {
            "prompt_input_ids": ids(1 + i),
            "chosen_input_ids": ids(2 + i % 3),
            "rejected_input_ids": ids(5 - i % 4),
        }
        for i in range(count)
    ]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Padded rows, a pair's chosen completion at 2i and its rejected one at 2i + 1."""
    sequences = [(row["prompt_input_ids"], row[f"{side}_input_ids"]) for row in rows for side in ("chosen", "rejected")]
    width = max(len(prompt) + len(completion) for prompt, completion in sequences)
    batch = {name: torch.zeros(len(sequences), width, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    batch["labels"] = torch.full_like(batch["input_ids"], -100)
    for index, (prompt, completion) in enumerate(sequences):
        end = len(prompt) + len(completion)
        batch["input_ids"][index, :end] = torch.tensor(prompt + completion)
        batch["attention_mask"][index, :end] = 1
        batch["labels"][index, len(prompt) : end] = torch.tensor(completion)
    return batch


def pair_logps(scorer, model, batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of chosen and rejected, `(B,)` each."""
    scored = scorer.score(model, batch)
    sums = sum_by_sequence(scored.logps, scored.positions.sequence, len(batch["input_ids"]))
    return split_pairs(sums)


class Counted:
    """A frozen reference with its pass, and how many rows it was asked for."""

    def __init__(self, *, seed: int = 1, dtype: torch.dtype = torch.float32, packed: bool | None = None) -> None:
        model = tiny_model("llama", seed=seed, dtype=dtype)
        self.reference = FrozenModel(model, Scorer(model, packed=packed))
        self.rows = 0

    def score(self, batch) -> dict[str, torch.Tensor]:
        """The columns of a batch."""
        self.rows += len(batch["input_ids"]) // 2
        chosen, rejected = self.reference.score(torch.nn.Identity(), batch, pair_logps)
        return dict(zip(COLUMNS, (chosen, rejected), strict=True))

    def run(self, dataset, *, batch_size: int = 2, accelerator=None, **options) -> Dataset:
        """The dataset with its columns."""
        options = {"collate": collate, "score": self.score, **options}
        return precompute_ref_log_probs(
            dataset,
            ReferencePass(COLUMNS, batch_size=batch_size, **options),
            reference_fingerprint=self.reference.fingerprint(torch.nn.Identity()),
            accelerator=accelerator or Accelerator(cpu=True),
        )


def main(out: str, batch_size: str) -> None:
    torch.set_num_threads(1)
    datasets.config.HF_DATASETS_CACHE = str(Path(out, "cache"))
    accelerator = Accelerator(cpu=True)
    counted = Counted()
    found = [
        counted.run(Dataset.from_list(pair_rows()), batch_size=int(batch_size), accelerator=accelerator)
        for _ in range(2)
    ]
    columns = [{name: list(dataset[name]) for name in COLUMNS} for dataset in found]
    text = json.dumps({"columns": columns, "rows": counted.rows})
    (Path(out) / f"columns_{accelerator.process_index}.json").write_text(text)
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
