"""Identity of a run: method, model, data and settings, written into its checkpoints and compared on resuming."""

import json
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import Any

import xxhash
from datasets import Dataset
from transformers import PreTrainedConfig

from trl.checkpoints.spread import check_spread, compared_settings
from trl.checkpoints.wholeness import CheckpointError, read_manifest
from trl.options.checks import Settings
from trl.options.secrets import redacted

Facts = Mapping[str, Any]
"""What a checkpoint says about its run, as JSON values."""

ROWS = 1000
_ADAPTER = ("peft_type", "r", "target_modules", "modules_to_save")
_NOT_COMPARED = (  # what does not change the training, by the begin of its name
    "output_dir", "resume_", "ignore_data_skip", "log", "save_", "eval_", "do_", "hub_", "push_to_hub", "report",
    "hang_", "run_name", "project", "trackio_", "disable_tqdm", "dataloader_num", "dataloader_p", "skip_memory",
    "enable_jit", "overwrite_", "restore_callback", "load_best", "metric_for_best", "greater_is", "prediction_loss",
    "include_", "local_rank", "per_device_eval", "remove_unused", "num_completions_to_print", "past_index", "debug",
    "batch_eval", "dataset_num_proc", "ddp_timeout", "checkpoint_mirror", "async_save",
)  # fmt: skip


def run_facts(
    *, method: str, config: PreTrainedConfig, adapters: Mapping[str, object], dataset: object, settings: Facts
) -> Settings:
    """What a checkpoint says about its run, as JSON values; of the model's config whole numbers count."""
    text = config.get_text_config().to_dict()
    sizes = {name: value for name, value in text.items() if type(value) is int and "token" not in name}
    model = {"model_type": config.model_type, **sizes, "adapters": {
        name: {key: getattr(adapter, key, None) for key in _ADAPTER} for name, adapter in adapters.items()
    }}  # fmt: skip
    compared = {name: value for name, value in settings.items() if not name.startswith(_NOT_COMPARED)}
    facts = {"method": method, "model": model, "data": fingerprint(dataset), "settings": compared}
    return redacted(json.loads(json.dumps(facts, default=_plain)))


def fingerprint(dataset: object) -> dict[str, int | str] | None:
    """The number of rows and a hash of at most 1,000, without added log-probs; None for a stream."""
    if not isinstance(dataset, Dataset):
        return {"rows": len(dataset)} if isinstance(dataset, Sized) else None
    count = len(dataset)
    chosen = [n * (count - 1) // (ROWS - 1) for n in range(ROWS)] if count > ROWS else range(count)
    names = [name for name in dataset.column_names if "logps" not in name and name != "teacher_ids"]
    return {"rows": count, "hash": hash_rows(dataset.select_columns(names).select(chosen))}


def hash_rows(dataset: Dataset) -> str:
    """A hash of names and values, 32 hex digits; independent of how a data set was made, stored or chunked."""
    hasher, names = xxhash.xxh3_128(), sorted(dataset.column_names)
    for table in dataset.with_format("arrow").iter(batch_size=ROWS):
        for row in table.select(names).to_pylist():  # type: ignore[union-attr]
            hasher.update(repr(row).encode("utf-8", "surrogatepass"))
    return hasher.hexdigest()


def compare(checkpoint: Path, facts: Facts, *, ignore_data: bool = False) -> list[str]:
    """Lines on changed settings. Raises: CheckpointError for another method, model, data or steps (unless ignored)."""
    recorded = redacted(read_manifest(checkpoint))  # older ones have secrets
    if not recorded:
        return []
    if recorded["method"] != facts["method"]:
        fault = f"{checkpoint} is of a run of {recorded['method']}, and this is {facts['method']}"
        raise CheckpointError(f"{fault}. To use its weights, give it as the model of a new run.")
    if differs := _differences(recorded["model"], facts["model"]):
        other = f"another model ({', '.join(differs)})"
        raise CheckpointError(f"{checkpoint} is of {other}. Resume with the model that was trained there.")
    if (begun := recorded.get("date")) and begun != facts.get("date", begun):
        raise CheckpointError(
            f"{checkpoint} was trained with the date {begun} in its chat template, and these rows have "
            f"{facts['date']}. Set resume_from_checkpoint={str(checkpoint)!r} in the config before the trainer is made."
        )
    lines = _differences(compared_settings(recorded["settings"], facts["settings"]), facts["settings"])
    if not ignore_data and recorded["data"] and facts["data"] and _differences(recorded["data"], facts["data"]):
        also = f" Settings that differ: {', '.join(lines)}." if lines else ""
        raise CheckpointError(
            f"{checkpoint} was trained on other rows ({recorded['data']['rows']}, now {facts['data']['rows']}).{also} "
            "Resume with the same data, or set ignore_data_skip=True to train on this data from its first row."
        )
    if not ignore_data:
        check_spread(checkpoint, recorded, {**facts})
    return lines


def _differences(recorded: Facts, facts: Facts) -> list[str]:
    names = [name for name in recorded if name in facts and recorded[name] != facts[name]]
    return [f"{name}: {recorded[name]!r}, now {facts[name]!r}" for name in names]


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, set) else type(value).__name__
