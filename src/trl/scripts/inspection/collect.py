"""A data set prepared by the trainer of a method, and everything that is looked at in it.

The trainer is built around a small stand-in of the model (its config with few, narrow layers, its tokenizer), so that
no weights are loaded; what it does to the rows is what training does.
"""

import copy
import logging
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset, IterableDataset
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from trl.data.formats import Row, RowDict, has_images, image_column
from trl.data.pipeline import SHOWN_ROWS, Preparation, PreparationReport, prepare_dataset
from trl.data.prepared_sets import PreparedSets, sequence_lengths
from trl.data.prompts import stored_rows
from trl.data.ragged import list_lengths
from trl.data.rendering import text_tokenizer
from trl.models.switches import holding
from trl.scripts.inspection import faults
from trl.scripts.inspection.faults import Fault
from trl.scripts.inspection.texts import read_texts, row_parts
from trl.scripts.inspection.tokens import ShownRow, Token, shown_tokens
from trl.scripts.messages import Shown, sequences
from trl.scripts.training import COMMANDS, load_inputs, rewards, rewards_or_judge
from trl.trainer.images import ImageSets

if TYPE_CHECKING:
    from trl.data.sources import DatasetMixtureConfig
    from trl.options.model import ModelConfig
    from trl.scripts.arguments import AnyConfig, CommandArguments
    from trl.trainer.base_trainer import BaseTrainer

ONLINE = (rewards, rewards_or_judge)  # whose rows are prompts
STREAMED_ROWS = 10_000  # of a stream
IMAGE_ROWS = 500  # where `--rows` does not say how many: each image is resized
LIMITS = ("max_length", "max_prompt_length", "max_completion_length")
PLACE = "place_in_sample"
OF_TOKENS = (
    "vocab_size", "vocab_size_per_layer_input", "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"
)  # fmt: skip
SCORED_ROWS = 1_000  # whose answers are given to reward functions


@dataclass
class Inspection:
    """What is known of a data set: its numbers, its faults, and rows with their tokens."""

    title: str
    lengths: np.ndarray
    figures: dict[str, str]
    tokenizer: PreTrainedTokenizerBase
    faults: list[Fault]
    shown: list[ShownRow]
    rewards: dict[str, np.ndarray] = field(default_factory=dict)  # those that are known
    notes: list[str] = field(default_factory=list)


def inspect_data(
    options: Namespace, script_args: "CommandArguments", training_args: "AnyConfig", model_args: "ModelConfig",
    dataset_args: "DatasetMixtureConfig",
) -> Inspection:  # fmt: skip
    """Prepare the data as `trl METHOD` would, and look at it. Raises: what preparing raises for rows it refuses."""
    train, evaluation = load_rows(script_args, training_args, model_args, dataset_args, options.rows)
    method = options.method
    with TemporaryDirectory() as folder, quiet():
        context = write_stand_in(model_args, method, folder, with_images=has_images(train))
        training_args.output_dir = str(Path(folder) / "run")
        trainer = build(method, training_args, Path(folder) / "model", train, evaluation)
        lengths, reports = prepared_rows(trainer, train, evaluation)
        text_field = getattr(training_args, "dataset_text_field", "text")
        tokenizer = text_tokenizer(trainer.processing_class)  # type: ignore[arg-type]
        shown = shown_rows(trainer, train, options.shown, text_field)
        figures = figures_of(trainer, len(train), lengths, context)
        figures |= dict(report.summary().split(": ", 1) for report in reports.values())
        counted = faults.report_faults(reports.get("train", PreparationReport()))
        title = f"{script_args.dataset_name} for {method}"
        inspection = Inspection(title, lengths, figures, tokenizer, counted, shown)
        longer = np.flatnonzero(lengths > (context or np.inf))
        inspection.faults += faults.of_rows("rows longer than the context", longer, len(lengths), context)
        inspection.faults += faults.shown_faults(shown) + faults.label_faults(train)
        texts = read_texts(train, text_field)
        others = None if evaluation is None else read_texts(evaluation, text_field)
        inspection.faults += faults.text_faults(texts, others, tokenizer)
        try:
            inspection.faults += faults.near_faults(texts, others)
        except ImportError:
            inspection.notes.append("Near duplicates were not searched: pip install datasketch")
    if COMMANDS[method].others in ONLINE and (functions := getattr(script_args, "reward_funcs", None)):
        inspection.rewards = scored(functions, train, options.answers, inspection.notes)
        inspection.faults += faults.reward_faults(inspection.rewards, min(len(train), SCORED_ROWS))
        for name, values in inspection.rewards.items():
            if len(values):
                figures[name] = f"mean {values.mean():.4g}, from {values.min():.4g} to {values.max():.4g}"
    return inspection


def load_rows(
    script_args: "CommandArguments", training_args: "AnyConfig", model_args: "ModelConfig",
    dataset_args: "DatasetMixtureConfig", limit: int | None,
) -> tuple[Dataset, Dataset | None]:  # fmt: skip
    """The first rows of the training set (None: all, of a stream `STREAMED_ROWS`) and of the evaluation set."""
    inputs = script_args, training_args, model_args, dataset_args
    with holding(training_args, "eval_strategy", "steps"):
        try:
            sets = load_inputs(*inputs)
        except ValueError as error:
            if not str(error).startswith("dataset_test_split"):
                raise
            training_args.eval_strategy = "no"  # type: ignore[assignment]
            sets = load_inputs(*inputs)
    train, evaluation = (None if rows is None else first_rows(rows, limit) for rows in sets)
    assert train is not None
    return train, evaluation


def first_rows(rows: Dataset | IterableDataset, limit: int | None) -> Dataset:
    """The first rows of a set, stored."""
    limit = limit or (IMAGE_ROWS if image_column(rows.column_names or ()) else None)
    if isinstance(rows, IterableDataset):
        return stored_rows(rows.take(limit or STREAMED_ROWS))
    return rows if limit is None else rows.select(range(min(limit, len(rows))))


def write_stand_in(model_args: "ModelConfig", method: str, folder: str, *, with_images: bool) -> int | None:
    """Write a small model with the run's vocabulary and tokenizer into `folder`; returns its context in tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from trl.models.loading import load_processing_class
    from trl.models.packed.small_copy import small_copy
    from trl.models.setup import REWARD_MODEL, STEP_CLASSIFIER

    path, place = str(model_args.model_name_or_path), Path(folder) / "model"
    options = {"revision": model_args.model_revision, "trust_remote_code": model_args.trust_remote_code}
    whole = AutoConfig.from_pretrained(path, **options)
    config = whole.get_text_config()
    kind = {"reward": REWARD_MODEL, "prm": STEP_CLASSIFIER}.get(method)
    small = small_copy(config)
    for name, value in vars(config).items():
        if name in OF_TOKENS or name.endswith("_token_id"):
            setattr(small, name, value)
    if kind is not None:
        small.num_labels = kind.labels
    auto = AutoModelForCausalLM if kind is None else kind.auto
    if with_images and kind is None and config is not whole:
        auto, small = AutoModelForImageTextToText, with_decoder(whole, small)
    auto.from_config(small).save_pretrained(place)
    load_processing_class(path, **options).save_pretrained(place)
    model_args.model_name_or_path = str(place)
    return getattr(config, "max_position_embeddings", None)


def with_decoder(config: PretrainedConfig, decoder: PretrainedConfig) -> PretrainedConfig:
    """A vision-language model's config with another decoder, and one layer in its tower."""
    small, text, tower = copy.deepcopy(config), config.get_text_config(), getattr(config, "vision_config", None)
    setattr(small, next(name for name, part in vars(config).items() if part is text), decoder)
    for name in {"num_hidden_layers", "depth"} & vars(tower).keys():
        setattr(small.vision_config, name, 1)
    return small


def build(method: str, args: "AnyConfig", model: Path, train: Dataset, evaluation: Dataset | None) -> "BaseTrainer":
    """The trainer of a method around the model of a folder."""
    prefix, _, others, _, package = COMMANDS[method]
    module = import_module(f"{package}.{method.replace('-', '_')}_trainer")
    online = {"reward_funcs": lambda completions, **_: [0.0] * len(completions)} if others in ONLINE else {}
    args.report_to, args.model_init_kwargs = [], None  # type: ignore[assignment]
    return getattr(module, f"{prefix}Trainer")(
        model=str(model), args=args, train_dataset=train, eval_dataset=evaluation, **online
    )


def prepared_rows(
    trainer: Any, train: Dataset, evaluation: Dataset | None
) -> tuple[np.ndarray, dict[str, PreparationReport]]:
    """Tokens of the longest sequence of each training row, and what the preparation of the sets counted."""
    sets = trainer._sets
    if isinstance(sets, ImageSets):
        lengths, report = read_rows(trainer, train, "train")
        others = {} if evaluation is None else {"eval": read_rows(trainer, evaluation, "eval")[1]}
        return lengths, {"train": report, **others}
    names = sets.settings.sequences if isinstance(sets, PreparedSets) else (("input_ids",),)
    return sequence_lengths(trainer.train_dataset, names), dict(getattr(sets, "reports", {}))


def figures_of(trainer: Any, rows: int, lengths: np.ndarray, context: int | None) -> dict[str, str]:
    """The numbers of an inspection, in words."""
    args, prepared = trainer.args, trainer.train_dataset
    limit = getattr(args, "max_length", None) or getattr(args, "max_prompt_length", None)
    figures = {"rows": f"{rows:,}", "sequences": f"{len(lengths):,}", "tokens": f"{int(lengths.sum()):,}"}
    if len(lengths):
        middle, high, most = (int(value) for value in np.percentile(lengths, [50, 95, 100]))
        figures["tokens of a sequence"] = f"{middle:,} (median), {high:,} (95 %), {most:,} (longest)"
    figures["limit"] = "none" if limit is None else f"{limit:,} tokens"
    figures["the model's context"] = "unknown" if context is None else f"{context:,} tokens"
    if getattr(args, "packing", False) and args.max_length:
        filled = float(list_lengths(prepared, "input_ids").mean() / args.max_length)
        figures["packed"] = f"{len(prepared):,} rows of {args.max_length:,} tokens, {filled:.1%} filled"
    return figures


def collated(trainer: Any, rows: Iterable[Any], without: Sequence[str] = ()) -> Iterator[tuple[list[Shown], bool]]:
    """The sequences of raw rows, and whether tokens were cut; `without` some limits. Raises: ValueError."""
    limits = {name: None for name in without if hasattr(trainer.data_collator, name)}
    for number, row in enumerate(rows):
        collator = replace(trainer.data_collator, **limits)
        try:
            yield sequences(trainer, row, collator), bool(collator.rows_cut)
        except ValueError as error:
            raise ValueError(str(error).replace("row 0 of the batch", f"row {number}")) from error


def read_rows(trainer: Any, rows: Dataset, name: str) -> tuple[np.ndarray, PreparationReport]:
    """Tokens of the longest sequence of each raw row of a set, and the counts that a preparation makes."""
    report, lengths = PreparationReport(name, len(rows)), []
    for number, (shown, is_cut) in enumerate(collated(trainer, rows)):
        lengths.append(max(len(sequence.ids) for sequence in shown))
        report.tokens += sum(len(sequence.ids) for sequence in shown)
        untrained = not all("trained" in sequence.states for sequence in shown)
        equal = len(shown) == 2 and shown[0].ids == shown[1].ids
        for name, is_counted in {"truncated_rows": is_cut, "untrained_rows": untrained, "equal_rows": equal}.items():
            setattr(report, name, getattr(report, name) + is_counted)
            report.first.setdefault(name, []).extend([number] * (is_counted and len(report.first[name]) < SHOWN_ROWS))
    report.first["removed_tokens"] = report.first.get("truncated_rows", [])
    return np.array(lengths), report


def shown_rows(trainer: Any, rows: Dataset, count: int, text_field: str) -> list[ShownRow]:
    """`count` rows, evenly spaced, with what training does to each token."""
    numbers = sorted({int(at) for at in np.linspace(0, len(rows) - 1, num=min(count, len(rows)))})
    sets, sample = trainer._sets, rows.select(numbers)
    if isinstance(sets, PreparedSets):
        settings = sets.train_settings or sets.settings
        prepared = prepared_alone(sample, settings, sets)
        unlimited = [name for name in LIMITS if hasattr(settings, name)]
        whole = prepared_alone(sample, replace(settings, **dict.fromkeys(unlimited)), sets)
        pairs = [
            (number, sequences(trainer, row), sequences(trainer, whole[number])) for number, row in prepared.items()
        ]
    elif isinstance(sets, ImageSets):
        limited, whole = (collated(trainer, sample, without=names) for names in ((), LIMITS))
        pairs = [(at, row, entire) for at, ((row, _), (entire, _)) in enumerate(zip(limited, whole, strict=True))]
    else:
        prompts = (sequences(trainer, row) for row in trainer.train_dataset.select(numbers))
        pairs = [(at, row, row) for at, row in enumerate(prompts)]
    tokenizer, shown = text_tokenizer(trainer.processing_class), []
    for place, row, whole in pairs:
        number = numbers[place]
        parts, entire = row_parts(rows[number], text_field), {sequence.title: sequence.ids for sequence in whole}
        tokens = dict[str, list[Token]]()
        for sequence in row:
            texts = [part for part in parts if belongs(part.column, sequence.title)]
            tokens[sequence.title] = shown_tokens(sequence, entire[sequence.title], texts, tokenizer)
        shown.append(ShownRow(number, tokens))
    return shown


def belongs(column: str, title: str) -> bool:
    """Whether the text of a column is in the sequence of this title."""
    return title not in ("prompt", "chosen", "rejected", "completion") or column in (title, "messages", "text")


def prepared_alone(rows: Dataset, settings: Preparation, sets: PreparedSets) -> dict[int, Row]:
    """Rows prepared without packing, by their place in `rows`; those that are dropped are not there."""
    changes: RowDict = {"packing": False} if hasattr(settings, "packing") else {}
    policy = "report" if "report" in settings.policies else "drop"
    kept = (*settings.keep_columns, PLACE)
    settings = replace(settings, untrained_rows=policy, num_proc=None, keep_columns=kept, **changes)
    numbered = rows.add_column(PLACE, list(range(len(rows))))  # type: ignore[call-arg]
    prepared = prepare_dataset(numbered, sets.processing_class, settings, name="train")[0]
    return {row.pop(PLACE): row for row in map(dict, prepared)}


@contextmanager
def quiet() -> Iterator[None]:
    """Without progress bars, and without the warnings of a preparation, which are among the faults."""
    has_bars, level = is_progress_bar_enabled(), logging.root.manager.disable
    logging.disable(max(level, logging.WARNING))
    disable_progress_bar()
    try:
        yield
    finally:
        if has_bars:
            enable_progress_bar()
        logging.disable(level)


def scored(functions: Sequence[str], rows: Dataset, column: str | None, notes: list[str]) -> dict[str, np.ndarray]:
    """The rewards that functions give the answers in a column of the first rows, by name."""
    from trl.rewards import RewardInputs, RewardSources, resolve_reward_funcs

    rows = rows.select(range(min(len(rows), SCORED_ROWS)))
    if column is None or column not in rows.column_names:
        wanted = "" if column is None else f" (there is no {column!r})"
        notes.append(
            f"Rewards were not tried: name the column with answers, --answers COLUMN{wanted}, one of "
            f"{', '.join(rows.column_names)}."
        )
        return {}
    columns = {name: list(rows[name]) for name in rows.column_names}
    answers = [
        [{"role": "assistant", "content": answer}] if isinstance(prompt, list) and isinstance(answer, str) else answer
        for prompt, answer in zip(columns["prompt"], columns[column], strict=True)
    ]
    with closing(RewardSources(resolve_reward_funcs(functions), on_failure="skip")) as sources:
        scores = sources.score(RewardInputs(columns["prompt"], answers, columns=columns)).scores.numpy()
    return {name: values[~np.isnan(values)] for name, values in zip(sources.names, scores.T, strict=True)}
