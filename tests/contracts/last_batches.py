"""Runs whose epochs end in a batch that is not full, of two processes or of one with as many micro-batches.

As a program in two processes: `-m tests.contracts.last_batches OUT.pt`.
"""

import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from tests.architectures import model_of
from tests.contracts.methods import CLOCKS, OF_THE_RUN, ROWS, Found, metrics_of, sft
from tests.tiny_vision import tiny_image, tiny_processor, tiny_vision_model
from tests.trainer.one_step import fixed_rows

METHODS = (
    "sft", "sft-padding-free", "gkd", "gkd-on-policy", "gold", "dpo-sigmoid", "dpo-aot", "dpo-bco_pair", "dpo-rpo", "cpo-simpo",
    "kto", "kto-apo", "bco", "bco-matched", "reward", "reward-centered", "prm",
)  # fmt: skip
# Rows of an epoch, micro-batches of a step; of five rows in batches of two, the second process has none of the last round.
SIZES = {"7 rows": (7, 1), "5 rows": (5, 1), "5 rows, accumulated": (5, 2)}
# Of each kind of loss, one has a last batch of one row.
OF_EACH_KIND = ("sft", "gkd", "dpo-sigmoid", "kto", "bco", "reward", "prm")
OF_METHODS = {
    f"{method}, {size}": (method, *SIZES[size])
    for method in METHODS
    for size in SIZES
    if size != "7 rows" or method in OF_EACH_KIND
}
PACKED = {
    "packing": True, "max_length": 24, "per_device_train_batch_size": 1, "train_dataset": Dataset.from_list(fixed_rows())
}  # three packed rows  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "workers": {"dataloader_num_workers": 2},
    "in order": {"train_sampling_strategy": "sequential"},
    "by length": {"train_sampling_strategy": "group_by_length"},
    "packed": PACKED,
    "counted": {"include_num_input_tokens_seen": "non_padding"},
    "all counted": {"include_num_input_tokens_seen": "all", "padding_free": True},
}
MODELS = ("convolutions", "convolutions, packed", "linear attention, accumulated", "images")
LONG = {"per_device_train_batch_size": 2, "max_steps": -1, "num_train_epochs": 2}


def run(make: Any, processes: int, rows: int, turns: int, **settings: Any) -> Found:
    """Two epochs on the first `rows`; `turns` micro-batches of two processes make a step."""
    trainer = make(**{**LONG, "gradient_accumulation_steps": turns * 2 // processes, **settings})
    if "packing" not in settings:
        trainer.train_dataset = trainer.train_dataset.select(range(rows))
    trainer.train()
    logs = [
        {name: v for name, v in log.items() if name not in OF_THE_RUN and not any(word in name for word in CLOCKS)}
        for log in trainer.state.log_history[:-1]
    ]
    tokens = {"seen": trainer.state.num_input_tokens_seen}
    weights = {
        name: value.detach().clone()
        for name, value in trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    }
    return Found([*trainer.keep.steps, weights], logs, tokens)


def pictures(**settings: Any) -> Any:
    processor = tiny_processor()
    rows = [
        {"images": [tiny_image(row)] * (row % 3), "prompt": text, "completion": "Blue."}
        for row, text in enumerate(["Why?", "What is it?", "And then? Look up.", "How many apples?", "Yes or no?"])
    ]
    rows = [{**row, "prompt": "<image> " * len(row["images"]) + row["prompt"]} for row in rows]
    return sft(
        model=tiny_vision_model(processor, dtype=torch.float64), processing_class=processor, max_length=None,
        train_dataset=Dataset.from_list(rows), **settings,
    )  # fmt: skip


def of_model(name: str, processes: int) -> Found:
    """Five rows on a model whose decoder is given one packed row inside, with layers that mix it by themselves."""
    if name == "images":
        return run(pictures, processes, 5, 1)
    model = model_of("qwen3_5_text" if "linear" in name else "lfm2", dtype=torch.float64)
    return run(sft, processes, 5, 1 + ("accumulated" in name), model=model, **(PACKED if "packed" in name else {}))


def resumed(processes: int) -> Found:
    """A run that stopped after the second step of three of an epoch."""
    folder = tempfile.mkdtemp() if processes == 1 else sys.argv[2]
    given = {
        **LONG,
        "gradient_accumulation_steps": 2 // processes,
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 4,
    }
    rows = Dataset.from_list([*fixed_rows(), *fixed_rows()[:1]])
    sft(folder, train_dataset=rows, **given).train()
    trainer = sft(folder, train_dataset=rows, **given)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return Found(trainer.keep.steps, [], {})


def dropped(processes: int) -> Found:
    """Batches of all processes that are not full are left out."""
    given = {
        "per_device_train_batch_size": 4 // processes,
        "dataloader_drop_last": True,
        "max_steps": -1,
        "num_train_epochs": 2,
    }
    trainer = sft(train_dataset=Dataset.from_list(fixed_rows()[:7]), **given)
    trainer.train()
    return Found(trainer.keep.steps, [], {})


def loader_of_a_program(processes: int) -> dict[str, float]:
    """The metrics of five rows, read by an overridden `get_eval_dataloader`."""
    trainer = sft()
    rows: Any = trainer.train_dataset.select(range(5))

    def get_eval_dataloader(eval_dataset: Any = None) -> Any:
        loader = DataLoader(rows, batch_size=4 // processes, collate_fn=trainer.data_collator)
        return trainer.accelerator.prepare(loader)

    trainer.get_eval_dataloader = get_eval_dataloader
    return metrics_of(trainer, rows)


def uneven() -> list[str]:
    """The errors of processes with data sets of different lengths."""
    trainer, found = sft(), []
    trainer.train_dataset = trainer.train_dataset.select(range(8 - trainer.args.process_index))
    for call in (trainer.train, lambda: trainer.evaluate(trainer.train_dataset)):
        try:
            call()
        except ValueError as error:
            found.append(str(error))
    return found


def every(processes: int) -> dict[str, Found]:
    found = {}
    for name, (method, *sizes) in OF_METHODS.items():
        make, own = ROWS[method]
        found[name] = run(make, processes, *sizes, **own)
    for name, settings in OTHERS.items():
        found[name] = run(sft, processes, 5, 1, **settings)
    found |= {name: of_model(name, processes) for name in MODELS}
    return {**found, "resumed": resumed(processes), "dropped": dropped(processes)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    results, errors, metrics = every(2), uneven(), loader_of_a_program(2)
    if torch.distributed.get_rank() == 0:
        found = {name: tuple(result) for name, result in results.items()}
        torch.save({**found, "uneven": errors, "own loader": metrics}, sys.argv[1])
    torch.distributed.barrier()
