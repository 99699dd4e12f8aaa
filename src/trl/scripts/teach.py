"""`trl teach DATASET --teacher MODEL --output DIR`: a teacher's most likely tokens as columns, to train without it."""

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl.data.rendering import Json
from trl.data.sources import DatasetMixtureConfig
from trl.options.groups import option
from trl.options.model import ModelConfig
from trl.scripts.arguments import ColumnMapping, ScriptArguments
from trl.scripts.parser import TrlParser
from trl.scripts.running import CommandError, reporting_input_errors, run_script
from trl.trainer.gkd_config import GKDConfig

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset
    from torch import Tensor, nn

    from trl.models.policy import Policy
    from trl.models.scoring.causal import Scorer

SETTINGS_FILE = "teacher.json"


@dataclass
class TeachScriptArguments(ColumnMapping, ScriptArguments):
    """What `trl teach` reads besides `GKDConfig` and `ModelConfig`."""

    teacher: str | None = option(None, "Teacher: a folder or a name on the Hub. None: teacher_model_name_or_path.")
    output: str | None = option(None, "New folder for the rows and their columns, or that of a run that was stopped.")
    top_k: int = option(64, "How many of the teacher's most likely tokens are kept for each token.", ">= 1")
    rows_per_shard: int = option(500, "Rows of a file; a run that was stopped resumes after a file.", ">= 1")


def make_parser() -> TrlParser:
    """The options of `trl teach`: those of `trl gkd`, so that both read the same config file, and its own."""
    types: Any = (TeachScriptArguments, GKDConfig, ModelConfig, DatasetMixtureConfig)
    parser = TrlParser(
        types,
        prog="trl teach",
        usage="trl teach DATASET --teacher TEACHER --output DIR [options]",
        description="Write a teacher's most likely tokens and their log-probs beside each row, as columns that "
        "`trl gkd` trains on without a teacher. Rows are prepared as `trl gkd` prepares them.",
        epilog="--model_name_or_path STUDENT takes the tokenizer from there. --per_device_eval_batch_size rows are "
        "scored at a time. Options of `trl gkd` that do not concern the data have no effect.",
    )
    parser.add_argument("dataset", metavar="DATASET", nargs="?", help="the same as --dataset_name")
    return parser


def main(
    script_args: TeachScriptArguments, args: GKDConfig, model_args: ModelConfig, dataset_args: DatasetMixtureConfig,
    rest: argparse.Namespace,
) -> None:  # fmt: skip
    """Write the data set and print where it is. Raises: CommandError for mistakes in the input."""
    from accelerate import PartialState

    from trl.scripts.loading import check_output_dir

    script_args.dataset_name = rest.dataset or script_args.dataset_name
    with reporting_input_errors():
        script_args.teacher = script_args.teacher or args.teacher_model_name_or_path
        for name in ("teacher", "output"):
            if getattr(script_args, name) is None:
                raise ValueError(f"{name} is missing. Give --{name}.")
        folder = Path(str(script_args.output))
        check_output_dir(str(script_args.output))
        args.packing = False  # training packs
        if script_args.dataset_streaming or dataset_args.streaming:
            raise ValueError("dataset_streaming=True: shards are made of stored rows. Leave it out.")
        rows, policy = _prepared(script_args, args, model_args, dataset_args)
        settings = _settings(script_args, args, policy, rows)
        staging = folder.with_name(f"{folder.name}.incomplete")
        for place in (folder, staging):
            _check_settings(place, settings)
    is_complete, is_first = folder.exists(), args.process_index == 0
    PartialState().wait_for_everyone()  # until all have looked at the folders
    if not is_complete:
        if is_first:
            staging.mkdir(parents=True, exist_ok=True)
            (staging / SETTINGS_FILE).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        PartialState().wait_for_everyone()
        files = _write_shards(staging, rows, policy, script_args, args)
        PartialState().wait_for_everyone()
        if is_first:
            _check_shards(files)
            staging.rename(folder)
    if is_first:
        print(f"{len(rows)} rows with {' and '.join(settings['columns'])} in {folder}")
        options = f"--model_name_or_path STUDENT --lmbda 0 --temperature {args.temperature}"
        print(f"To train: trl gkd --dataset_name {folder} {options}")


def _prepared(
    script_args: TeachScriptArguments, args: GKDConfig, model_args: ModelConfig, dataset_args: DatasetMixtureConfig
) -> "tuple[Dataset, Policy]":
    """The rows as GKD trains on them, and the teacher with the student's tokenizer (its own if no student is given)."""
    from trl.models.loading import load_processing_class
    from trl.models.parts import causal_core, embedded_tokens
    from trl.models.policy import set_up_policy
    from trl.scripts.loading import load_train_and_eval, model_init_kwargs
    from trl.trainer.gkd_trainer import GKDSets, gkd_sets

    dataset, _ = load_train_and_eval(script_args, dataset_args, renames=script_args.renames(), evaluate=False)
    args.model_init_kwargs = model_init_kwargs(model_args, args.teacher_model_init_kwargs)
    student = model_args.model_name_or_path
    tokenizer = None if student is None else load_processing_class(student)
    policy = set_up_policy(script_args.teacher, args, tokenizer, None, trained=False)
    if embedded_tokens(causal_core(policy.model)) < len(policy.tokenizer):
        fault = f"the teacher has fewer token ids than the {len(policy.tokenizer)} of the student's tokenizer"
        raise ValueError(f"{fault}: they do not share it. Use GOLDTrainer, which compares two vocabularies.")
    if not hasattr(policy.model, "hf_device_map"):
        policy.model.to(args.device)
    rows: Any = gkd_sets(args, policy, None, GKDSets).prepared(dataset, "train")
    return rows, policy


def _settings(script_args: TeachScriptArguments, args: GKDConfig, policy: "Policy", rows: "Dataset") -> Json:
    from trl.checkpoints.identity import fingerprint
    from trl.data.teacher_columns import TEACHER_COLUMNS, vocabulary_hash

    loading: Any = args.model_init_kwargs
    names = (
        "max_length", "completion_only_loss", "assistant_only_loss", "dataset_text_field", "eos_token",
        "dataset_kwargs",
    )  # fmt: skip
    return {
        "format": 1, "columns": TEACHER_COLUMNS, "teacher": script_args.teacher,
        "loaded_with": {name: str(value) for name, value in loading.items()}, "top_k": script_args.top_k,
        "temperature": args.temperature, "tokenizer": vocabulary_hash(policy.tokenizer),
        "chat_template": policy.tokenizer.chat_template, "rows_per_shard": script_args.rows_per_shard,
        "data": fingerprint(rows), "preparation": {name: getattr(args, name) for name in names},
    }  # fmt: skip


def _check_settings(folder: Path, settings: Json) -> None:
    file = folder / SETTINGS_FILE
    if not folder.exists():
        return
    if not file.is_file():
        raise ValueError(f"output={folder} has no {SETTINGS_FILE}, expected a new folder. Name another one.")
    known, present = json.loads(file.read_text(encoding="utf-8")), json.loads(json.dumps(settings))
    if changed := [name for name in present if known.get(name) != present[name]]:
        changes = ", ".join(f"{name}={known.get(name)!r} (now {present[name]!r})" for name in changed)
        raise ValueError(f"{folder} was written with {changes}. Use these settings, or name another output.")


def _write_shards(
    folder: Path, rows: "Dataset", policy: "Policy", script_args: TeachScriptArguments, args: GKDConfig
) -> list[Path]:
    """Write this process's share of the missing shards, each whole or not at all; returns all files."""
    import pyarrow.parquet as pq
    from tqdm.auto import tqdm

    size = script_args.rows_per_shard
    count = -(-len(rows) // size)
    files = [folder / f"train-{number:05d}-of-{count:05d}.parquet" for number in range(count)]
    missing = [number for number in range(args.process_index, count, args.world_size) if not files[number].is_file()]
    for number in tqdm(missing, desc="Shards", disable=args.disable_tqdm or None):
        shard = rows.select(range(number * size, min((number + 1) * size, len(rows))))
        aside = files[number].with_suffix(".incomplete")
        pq.write_table(_with_columns(shard, policy, script_args, args), aside)
        os.replace(aside, files[number])
    return files


def _check_shards(files: list[Path]) -> None:
    if missing := [file.name for file in files if not file.is_file()]:
        fault = f"{files[0].parent} has no {missing[0]} ({len(missing)} of {len(files)} files are missing)"
        raise CommandError(f"{fault}. Use an output that all processes share, and run the command again.")


def _with_columns(shard: "Dataset", policy: "Policy", script_args: TeachScriptArguments, args: GKDConfig) -> "pa.Table":
    """The rows of a shard with their columns, as an arrow table. Rows of similar length are scored together."""
    import numpy as np
    import pyarrow as pa
    import torch
    from accelerate.utils import send_to_device

    from trl.collators.language_modelling import DataCollatorForLanguageModeling
    from trl.data.ragged import list_lengths
    from trl.data.teacher_columns import TEACHER_COLUMNS, TEACHER_SETTINGS, vocabulary_hash
    from trl.models.packed.layout import scored_sequences

    scorer, size = policy.scorer, args.per_device_eval_batch_size
    completion_only = args.completion_only_loss is not False
    collate = DataCollatorForLanguageModeling(scorer.pad_token_id, completion_only, padding_free=True)
    order = np.argsort(-list_lengths(shard, "input_ids"), kind="stable").tolist()
    columns: list[tuple[Tensor, ...]] = [()] * len(shard)
    for start in range(0, len(order), size):
        numbers = order[start : start + size]
        batch = send_to_device(collate([shard[number] for number in numbers]), args.device)
        counts = torch.bincount(scored_sequences(batch), minlength=len(numbers)).tolist()
        best = most_likely(scorer, policy.model, batch, k=script_args.top_k, temperature=args.temperature)
        for number, *best_tokens in zip(numbers, *(part.split(counts) for part in best), strict=True):
            columns[number] = tuple(best_tokens)
    table: Any = shard.with_format("arrow")[:]
    table = table.replace_schema_metadata(None)
    offsets = np.cumsum([0, *(len(ids) for ids, _ in columns)], dtype=np.int32)
    for name, parts, kind in zip(TEACHER_COLUMNS, zip(*columns, strict=True), ("int32", "float32"), strict=True):
        values = torch.cat(parts).numpy().astype(kind)
        starts = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
        inner = pa.ListArray.from_arrays(starts, values.ravel())
        table = table.append_column(name, pa.ListArray.from_arrays(offsets, inner))
    tokenizer = vocabulary_hash(policy.tokenizer)
    said = {"teacher": script_args.teacher, "temperature": args.temperature, "tokenizer": tokenizer}
    return table.append_column(TEACHER_SETTINGS, pa.array([json.dumps(said)] * len(shard)))


def most_likely(
    scorer: "Scorer", model: "nn.Module", batch: Any, *, k: int, temperature: float
) -> "tuple[Tensor, Tensor]":
    """The k most likely tokens at each scored position, and their log-probs: `(K, k)` each."""
    import torch

    from trl.models.switches import in_eval_mode

    chunks = []

    def keep(logits: "Tensor", _: object, rows: slice) -> "Tensor":
        best = logits.topk(min(k, logits.shape[-1]))
        chunks.append((best.indices, best.values - logits.logsumexp(-1, keepdim=True)))
        return logits.new_zeros(len(logits))

    with torch.no_grad(), in_eval_mode(model):
        scorer.over_chunks(model, batch, keep, temperature=temperature)
    if not chunks:
        return torch.zeros(0, k, dtype=torch.int64), torch.zeros(0, k)
    return tuple(torch.cat(parts).cpu() for parts in zip(*chunks, strict=True))  # type: ignore[return-value]


if __name__ == "__main__":
    sys.exit(run_script(make_parser(), main))
