"""What a training command prints: a dry run's settings, rows and memory; after training, results and how to resume."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.console import Console
from rich.text import Text

from trl.checkpoints.wholeness import newest_whole
from trl.collators.images import image_tokens
from trl.data.formats import image_column
from trl.data.preference_rows import SIDES
from trl.data.rendering import Fields, ProcessingClass, text_tokenizer
from trl.models.loading import save_dtype
from trl.reporting.tables import open_console
from trl.reporting.usage import usage_of
from trl.scripts.planning.state import optimizer_bytes, tensor_bytes

if TYPE_CHECKING:
    from transformers import TrainingArguments

Trainer = Any  # a `BaseTrainer`, whose model and data transformers declares as optional
_MOST_TOKENS = 400  # of a sequence; of longer ones the ends are shown
_STATES = {
    "trained": ("black on green", ">>{}<<"), "masked": ("dim", "{}"), "cut": ("red strike", "[[{}]]"),
    "image": ("blue", "{}"),
}  # fmt: skip


class Shown(NamedTuple):
    """A sequence of a row: its tokens, and of each whether it is "trained" (the loss or the score depends on it),
    "masked", an "image"'s or "cut" off."""

    title: str
    ids: list[int]
    states: list[str]


def _states(trained: Iterable[bool], ids: Iterable[int], images: Sequence[int] = ()) -> list[str]:
    states = ["trained" if is_trained else "masked" for is_trained in trained]
    return ["image" if token in images else state for token, state in zip(ids, states, strict=True)]


def describe(trainer: Trainer, settings: Mapping[str, object], *, made_folder: bool) -> None:
    """Print settings, rows and memory; remove the empty folder that the trainer made, and end its processes."""
    if trainer.accelerator.is_main_process:
        console = open_console(highlight=False, soft_wrap=True)
        console.print("Settings that differ from their defaults", style="bold")
        rows = (sequences(trainer, row) for row in itertools.islice(iter(trainer.train_dataset), 2))
        print_rows(console, settings, enumerate(rows), trainer.processing_class)
        console.print("\nMemory of one process, unsharded and without activations", style="bold")
        parts = memory(trainer)
        for name, size in {**parts, "together": sum(parts.values())}.items():
            console.print(f"  {name:<{max(map(len, parts))}}  {size / 2**20:,.1f} MiB")
        console.print(bytes_per_weight(trainer, parts))
        console.print("\nDry run: nothing was trained or written.")
        folder = Path(trainer.args.output_dir)
        if made_folder and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    trainer.accelerator.end_training()


def print_rows(
    console: Console, values: Mapping[str, object], rows: Iterable[tuple[int, list[Shown]]],
    processing_class: ProcessingClass,
) -> None:  # fmt: skip
    """Print values by name, and rows by number: their sequences of tokens."""
    width = max(map(len, values), default=0)
    for name, value in values.items():
        console.print(f"  {name:<{width}}  {value}", markup=False)
    for number, row in rows:
        console.print(f"\nRow {number}", style="bold")
        for sequence in row:
            console.print(rendered(processing_class, sequence, colour=console.is_terminal))


def sequences(trainer: Trainer, row: Fields) -> list[Shown]:
    """The token sequences of a prepared row."""
    parts = {name: list(row[name]) for name in row if name.endswith("_input_ids") and row[name] is not None}
    if parts:
        title = {name: name.removesuffix("_input_ids") for name in parts}
        trained = {name: title[name] in (*SIDES, "completion") for name in parts}  # KTO's KL is a constant
        return [Shown(title[name], ids, _states([trained[name]] * len(ids), ids)) for name, ids in parts.items()]
    with_images = image_column(list(row)) is not None
    if "input_ids" not in row and not with_images:
        return []
    images = image_tokens(trainer.processing_class, None) if with_images else ()
    batch = trainer.data_collator([row])
    if "labels" not in batch:  # a prompt: the completions that are trained do not exist yet
        return [Shown("prompt", ids := list(row["input_ids"]), _states([False] * len(ids), ids, images))]
    titles = SIDES if len(batch["input_ids"]) > 1 else ("text",)
    kept = batch.get("attention_mask", torch.ones_like(batch["input_ids"])) != 0
    rows = zip(titles, batch["input_ids"], batch["labels"] != -100, kept, strict=True)
    return [
        Shown(title, real := ids[kept].tolist(), _states(trained[kept].tolist(), real, images))
        for title, ids, trained, kept in rows
    ]


def rendered(processing_class: ProcessingClass, sequence: Shown, *, colour: bool) -> Text:
    """A sequence as text. What is trained is coloured or between >> and <<, what is cut off between [[ and ]]."""
    tokenizer: Any = text_tokenizer(processing_class)
    text = Text(f"{sequence.title} ({len(sequence.ids)} tokens, {sequence.states.count('trained')} trained): ")
    half = _MOST_TOKENS // 2
    cut = len(sequence.ids) > _MOST_TOKENS
    for part in (slice(0, half), slice(-half, None)) if cut else (slice(None),):
        pairs = zip(sequence.states[part], sequence.ids[part], strict=True)
        for state, run in itertools.groupby(pairs, key=lambda pair: pair[0]):
            ids = [token for _, token in run]
            piece = f"[{len(ids)} image tokens]" if state == "image" else tokenizer.decode(ids)
            style, marks = _STATES[state]
            text.append(piece if colour else marks.format(piece), style=style)
        if cut and part.start == 0:
            text.append(f" ... {len(sequence.ids) - _MOST_TOKENS} tokens ... ", style="italic")
    return text


def memory(trainer: Trainer) -> dict[str, int]:
    """Bytes of the weights, gradients, optimizer state and, where there is one, the reference model."""
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    parts = {
        "weights": tensor_bytes(trainer.model.parameters()),
        "gradients": tensor_bytes(trained),
        f"optimizer ({trainer.args.optim.value})": optimizer_bytes(trainer.args, trained, trainer.model),
    }
    reference = getattr(trainer, "ref_model", None)
    return parts if reference is None else {**parts, "reference": tensor_bytes(reference.parameters())}


def bytes_per_weight(trainer: Trainer, parts: dict[str, int]) -> str:
    """The bytes of a trained weight with its gradient and optimizer state, its dtype and that of the saved model."""
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    size = tensor_bytes(trained) + sum(list(parts.values())[1:3])
    dtypes = trained[0].dtype, save_dtype(trainer.model, trainer.args.save_dtype) or trained[0].dtype
    dtype, saved = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    count = sum(parameter.numel() for parameter in trained)
    return f"  {size / count:.1f} bytes for each trained weight ({dtype}; saved in {saved})"


def finish(
    trainer: Trainer, *, dataset_name: str | None, command: str, newest: Path | None, has_chats: bool = True
) -> None:
    """Save the model (and push it), and print how to use it and how to resume from the `newest` checkpoint."""
    args = trainer.args
    trainer.save_model(args.output_dir)
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=dataset_name)
    if trainer.accelerator.is_main_process:
        state, place = trainer.state, f"Model saved in {args.output_dir}"
        if args.load_best_model_at_end and state.best_model_checkpoint:
            name = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
            place += f": that of step {state.best_global_step}, the best ({name} {state.best_metric:.4g})"
        finished = state.global_step >= state.max_steps  # not one that a signal stopped
        resume = resume_hint(newest, args, command=command, finished=finished)
        print("\n".join([place, *usage(trainer, has_chats=has_chats), resume]))
    trainer.accelerator.end_training()


def usage(trainer: Trainer, *, has_chats: bool = True) -> list[str]:
    """How to use the saved model: `trl chat`, or Python without chats or a chat template; adapters name their base."""
    adapters = getattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config", {})
    base = next((f"  # an adapter of {adapter.base_model_name_or_path}" for adapter in adapters.values()), "")
    chats = has_chats and bool(text_tokenizer(trainer.processing_class).chat_template)
    lines = usage_of(trainer.args.output_dir, type(trainer.scorer.core).__name__, chats=chats, base=base)
    return [f"  {line}" for line in lines]


def resume_hint(newest: Path | None, args: "TrainingArguments", *, command: str, finished: bool) -> str:
    """The command that resumes a run from its `newest` checkpoint; a `finished` one needs more steps or epochs."""
    if newest is None:
        strategy = getattr(args.save_strategy, "value", args.save_strategy)
        every = f", --save_steps {args.save_steps}" if strategy == "steps" else ""
        why = f"no checkpoint was written (--save_strategy {strategy}{every})"
        if finished:
            return f"This run cannot be resumed: {why}. A new one can start from the model."
        return f"It cannot be resumed: {why}. The same command starts from the beginning."
    whole = newest_whole(str(args.output_dir), quick=True)
    resume = "true" if whole is not None and newest.resolve() == whole.resolve() else str(newest)
    longer = "max_steps" if args.max_steps > 0 else "num_train_epochs"
    same = f"the same options, a larger --{longer} and" if finished else "the same options and"
    without = " --resume_without optimizer random_state" if args.save_only_model and not args.deepspeed else ""
    return f"To resume: trl {command} with {same} --resume_from_checkpoint {resume}{without}"


def interruption(newest: Path | None, args: "TrainingArguments", *, command: str, step: int, steps: int) -> str:
    """The message for a run that stopped after `step` of its `steps` optimiser steps."""
    place = f"after step {step} of {steps}" if step else "before the end of the first step"
    saved = "" if newest is None else f", newest checkpoint {newest}"
    return f"Stopped {place}{saved}. {resume_hint(newest, args, command=command, finished=False)}"
