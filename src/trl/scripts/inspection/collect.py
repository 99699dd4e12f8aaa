"""A data set prepared by the trainer of a method, and everything that is looked at in it."""

import logging
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from tempfile import TemporaryDirectory

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from trl.data.formats import has_images
from trl.data.pipeline import PreparationReport
from trl.data.prepared_sets import sequence_lengths
from trl.data.prompts import stored_rows
from trl.data.ragged import list_lengths
from trl.data.rendering import text_tokenizer
from trl.models.loading import architecture_of, load_config, load_processing_class
from trl.models.setup import REWARD_MODEL, STEP_CLASSIFIER
from trl.models.switches import holding
from trl.reporting.run_events import histogram
from trl.scripts.inspection import faults
from trl.scripts.inspection.faults import Fault
from trl.scripts.inspection.tokens import ShownRow, shown_rows
from trl.scripts.messages import Trainer
from trl.scripts.training import COMMANDS, load_inputs

STREAMED_ROWS = 10_000  # of a stream
SCORED_ROWS = 1_000  # whose answers are given to reward functions
CLASSIFIERS = {"reward": REWARD_MODEL, "prm": STEP_CLASSIFIER}
# Without settings that need weights or more than this process, or put rows into another order.
LEFT_OUT = {
    "model_init_kwargs": None, "precompute_ref_log_probs": False, "report_to": [], "shuffle_dataset": False,
    "use_vllm": False, "weights": None,
}  # fmt: skip


@dataclass
class Inspection:
    """What is known of a data set: its numbers, its faults, and rows with their tokens."""

    title: str
    figures: dict[str, str]
    histograms: dict[str, list[tuple[int, str]]]  # bars
    tokenizer: PreTrainedTokenizerBase
    faults: list[Fault]
    shown: list[ShownRow]


def inspect_data(options: Namespace, inputs: tuple) -> Inspection:
    """Prepare the data as `trl METHOD` would, whose parser gives the `inputs`, and look at it.

    Raises: what preparing raises for rows it refuses.
    """
    script_args, args, _, _ = inputs
    if has_images(loaded := load_rows(inputs)):
        raise ValueError(f"trl inspect reads no images. `trl {options.method} --dry_run true` shows rows with images.")
    sets = {name: first_rows(rows, options.rows) for name, rows in loaded.items()}
    train, method, functions = sets["train"], options.method, getattr(script_args, "reward_funcs", None)
    if options.answers not in (None, *(columns := train.column_names)):
        raise ValueError(f"--answers must be one of the columns {', '.join(columns)}, got {options.answers!r}.")
    if options.answers and not functions:
        raise ValueError("--answers needs the --reward_funcs that are tried on them (grpo, rloo and other methods).")
    text_field = getattr(args, "dataset_text_field", "text")
    with TemporaryDirectory() as args.output_dir, holding(logging.lastResort, "level", logging.ERROR):
        trainer = stand_in_trainer(method, sets, inputs)
        reports = getattr(trainer._sets, "reports", {})
        lengths = sequence_lengths(trainer.train_dataset, trainer._sets.settings)
        shown = shown_rows(trainer, train, options.shown, text_field)
    context = getattr(trainer.model.config.get_text_config(), "max_position_embeddings", None)
    tokenizer = text_tokenizer(trainer.processing_class)
    figures = figures_of(trainer, len(train), lengths, context)
    figures |= dict(report.summary().split(": ", 1) for report in reports.values())
    if find_spec("datasketch") is None:
        figures["near duplicates"] = "not searched: pip install datasketch"
    histograms = {"Tokens of a sequence": histogram(lengths, "tokens")}
    longer = np.flatnonzero(lengths > (context or np.inf))
    counted = [
        *faults.report_faults(reports.get("train", PreparationReport())),
        *faults.of_rows("rows longer than the context", longer, len(lengths), context),
        *faults.prompt_faults(shown if method == "sft" else []),
        *faults.label_faults(train, method),
        *faults.text_faults(sets, text_field, tokenizer),
    ]
    if options.answers and functions:
        answered = first_rows(train, SCORED_ROWS)
        for name, values in scored(functions, answered, options.answers).items():
            if np.unique(values).size < 2:
                counted += faults.of_rows("constant rewards", None, len(answered), name)
            if values.size:
                histograms[f"Rewards of {name}"] = histogram(values, "reward")
                figures[name] = f"mean {values.mean():.4g}, from {values.min():.4g} to {values.max():.4g}"
    elif functions:
        figures["rewards"] = f"not tried: name the column with answers, --answers COLUMN, one of {', '.join(columns)}"
    return Inspection(f"{script_args.dataset_name} for {method}", figures, histograms, tokenizer, counted, shown)


def load_rows(inputs: tuple) -> dict[str, Dataset | IterableDataset]:
    """The training set, and the evaluation set if there is one."""
    try:
        with holding(inputs[1], "eval_strategy", "steps"):
            sets = load_inputs(*inputs)
    except ValueError:  # perhaps there are no evaluation rows, which these settings may not need
        sets = load_inputs(*inputs)
    return {name: rows for name, rows in zip(("train", "eval"), sets, strict=True) if rows is not None}


def first_rows(rows: Dataset | IterableDataset, limit: int | None) -> Dataset:
    """The first rows of a set, stored; without a limit all, of a stream `STREAMED_ROWS`."""
    if isinstance(rows, IterableDataset):
        return stored_rows(rows.take(limit or STREAMED_ROWS))
    return rows if limit is None else rows.select(range(min(limit, len(rows))))


def stand_in_trainer(method: str, sets: dict[str, Dataset], inputs: tuple) -> Trainer:
    """The trainer of a method around a model without its weights."""
    script_args, args, model_args, _ = inputs
    path, remote = str(model_args.model_name_or_path), {"trust_remote_code": model_args.trust_remote_code}
    source = {"revision": model_args.model_revision, **remote}
    config, kind = load_config(path, source), architecture_of(path, source)
    if method in CLASSIFIERS:
        kind, config.num_labels = CLASSIFIERS[method].auto, CLASSIFIERS[method].labels
    vars(args).update(LEFT_OUT)
    online = hasattr(script_args, "reward_funcs")
    module = import_module(f"{COMMANDS[method].package}.{method.replace('-', '_')}_trainer")
    return getattr(module, f"{COMMANDS[method].prefix}Trainer")(
        blank_model(kind, config, **remote), args=args, processing_class=load_processing_class(path, **source),
        train_dataset=sets["train"], eval_dataset=sets.get("eval"),
        **({"reward_funcs": lambda completions, **_: [0.0] * len(completions)} if online else {}),
    )  # fmt: skip


def blank_model(kind: type, config: PretrainedConfig, **remote: bool) -> PreTrainedModel:
    """A model whose tensors have their shapes, and a single zero of memory; so do its copies."""
    from_config = getattr(kind, "from_config", None)  # of an AutoModel
    with torch.device("meta"):
        model = kind(config) if from_config is None else from_config(config, **remote)
    model.float()._apply(lambda tensor: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape))
    model.__deepcopy__ = lambda memo: blank_model(type(model), model.config)
    return model


def figures_of(trainer: Trainer, rows: int, lengths: np.ndarray, context: int | None) -> dict[str, str]:
    """The numbers of an inspection, in words."""
    args, prepared = trainer.args, trainer.train_dataset
    limit = getattr(args, "max_length", None) or getattr(args, "max_prompt_length", None)
    middle, high, most = (int(value) for value in np.percentile(lengths, [50, 95, 100]))
    figures = {
        "rows": f"{rows:,}", "sequences": f"{len(lengths):,}", "tokens": f"{int(lengths.sum()):,}",
        "tokens of a sequence": f"{middle:,} (median), {high:,} (95 %), {most:,} (longest)",
        "limit": "none" if limit is None else f"{limit:,} tokens",
        "the model's context": "unknown" if context is None else f"{context:,} tokens",
    }  # fmt: skip
    if getattr(args, "packing", False) and args.max_length:
        filled = float(list_lengths(prepared, "input_ids").mean() / args.max_length)
        figures["packed"] = f"{len(prepared):,} rows of {args.max_length:,} tokens, {filled:.1%} filled"
    return figures


def scored(functions: Sequence[str], rows: Dataset, column: str) -> dict[str, np.ndarray]:
    """The rewards that functions give the answers in a column, by name."""
    from trl.rewards import RewardInputs, RewardSources, resolve_reward_funcs

    columns = {name: list(rows[name]) for name in rows.column_names}
    answers = [
        [{"role": "assistant", "content": answer}] if isinstance(prompt, list) and isinstance(answer, str) else answer
        for prompt, answer in zip(columns["prompt"], columns[column], strict=True)
    ]
    sources = RewardSources(resolve_reward_funcs(functions), on_failure="skip")
    scores = sources.score(RewardInputs(columns["prompt"], answers, columns=columns)).scores.numpy()
    return {name: values[np.isfinite(values)] for name, values in zip(sources.names, scores.T, strict=True)}
