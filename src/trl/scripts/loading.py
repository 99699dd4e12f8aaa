"""What a training command checks and loads before it trains: folder, checkpoint, processes, data, model options."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate import PartialState
from datasets import Dataset, DatasetDict, IterableDataset
from transformers import TrainingArguments

from trl.checkpoints.mirror import Mirror
from trl.checkpoints.progress import on_main
from trl.checkpoints.wholeness import checkpoint_to_load, checkpoints_in
from trl.data.formats import column_names
from trl.data.rendering import Json
from trl.models.peft import get_kbit_device_map, get_quantization_config
from trl.options.model import ModelSource
from trl.options.spelling import did_you_mean
from trl.scripts.arguments import ScriptArguments

if TYPE_CHECKING:
    from trl.data.sources import DatasetMixtureConfig

logger = logging.getLogger(__name__)
Rows = TypeVar("Rows", Dataset, IterableDataset)
_OTHER_ROWS = (
    " Or hold rows back: --test_split_size 0.1, or --dataset_train_split 'train[:90%]' --dataset_test_split "
    "'train[90%:]'; or use a folder with train.jsonl and test.jsonl; or set eval_strategy to 'no'."
)


def model_init_kwargs(model_args: ModelSource, explicit: Json | str | None = None) -> Json:
    """Arguments of `from_pretrained`; `explicit` ones win. A quantised model is placed on this process's device."""
    quantization = get_quantization_config(model_args)
    named = {
        "revision": model_args.model_revision, "trust_remote_code": model_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation, "dtype": model_args.dtype,
        "quantization_config": quantization, "device_map": None if quantization is None else get_kbit_device_map(),
    }  # fmt: skip
    arguments = {name: value for name, value in named.items() if value is not None}
    return {**arguments, **explicit} if isinstance(explicit, dict) else arguments


def load_train_and_eval(
    script_args: ScriptArguments, dataset_args: "DatasetMixtureConfig", *, renames: Mapping[str, str], evaluate: bool
) -> "tuple[Rows, Rows | None]":
    """The training dataset, and the evaluation dataset if `evaluate` (else None), columns renamed.

    Raises: ValueError for no dataset, two of them, or a missing split or column; FileNotFoundError.
    """
    if bool(script_args.dataset_name) == bool(dataset_args.datasets):
        sources = "Both dataset_name and a mixture are" if dataset_args.datasets else "No dataset is"
        raise ValueError(f"{sources} given. Give one --dataset_name, or a mixture as `datasets:` in a file.")
    from trl.data.sources import load_source

    splits = {"dataset_train_split": script_args.dataset_train_split}
    if evaluate:
        splits["dataset_test_split"] = script_args.dataset_test_split
    mixture = mixed_splits(script_args, dataset_args)
    if dataset_args.test_split_size is not None and not evaluate:
        logger.warning("test_split_size keeps rows from training, and eval_strategy='no' never evaluates them.")
    if mixture is not None and script_args.dataset_name:  # drawn from the training split
        splits = dict(zip(splits, ("train", "test"), strict=False))
    path = str(script_args.dataset_name)
    settings = {"name": script_args.dataset_config, "streaming": script_args.dataset_streaming}
    loaded: list[Any] = []
    for option, split in splits.items():
        try:
            if mixture is not None and split not in mixture:
                raise ValueError(f"the mixture has {', '.join(map(repr, mixture))}, not {split!r}.")
            rows: Any = load_source(path, split=split, **settings) if mixture is None else mixture[split]
        except ValueError as error:
            raise ValueError(f"{option}: {error}{_OTHER_ROWS if option == 'dataset_test_split' else ''}") from error
        loaded.append(rename_columns(rows, renames, name=f"split {split!r}"))
    return loaded[0], (loaded[1] if evaluate else None)


def mixed_splits(script_args: ScriptArguments, dataset_args: "DatasetMixtureConfig") -> DatasetDict | None:
    """The splits of a mixture, or of `dataset_name` where evaluation rows are drawn from it; None without either."""
    if not dataset_args.datasets and dataset_args.test_split_size is None:
        return None
    from trl.data.sources import DatasetConfig, get_dataset

    if script_args.dataset_name:
        path, config = script_args.dataset_name, script_args.dataset_config
        source = DatasetConfig(path, name=config, split=script_args.dataset_train_split)
        streaming = dataset_args.streaming or script_args.dataset_streaming
        dataset_args = replace(dataset_args, datasets=[source], streaming=streaming)
    return get_dataset(dataset_args)


def rename_columns(dataset: Rows, renames: Mapping[str, str], *, name: str) -> Rows:
    """The dataset with columns renamed (old -> new). Raises: ValueError for a missing column or a taken new name."""
    if not renames:
        return dataset
    present = column_names(dataset)
    if missing := [old for old in renames if old not in present]:
        there = f"it has {', '.join(present)}.{did_you_mean(missing[0], present)}"
        raise ValueError(f"column_mapping renames `{missing[0]}`, which is no column of {name}: {there}")
    if taken := [new for new in renames.values() if new in present and new not in renames]:
        raise ValueError(f"column_mapping gives a column the name `{taken[0]}`, which {name} already has.")
    return dataset.rename_columns(dict(renames))


# --- checks before anything is loaded


def check_output_dir(output_dir: str | Path) -> None:
    """Raise ValueError where `output_dir`, or the folder that it is to be made in, is a file or read-only."""
    folder = Path(output_dir)
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        wrong = "read-only" if there.is_dir() else "a file"
        raise ValueError(f"output_dir '{output_dir}' cannot be written to: '{there}' is {wrong}.")


def check_push(args: TrainingArguments) -> None:
    """Raise ValueError for `push_to_hub` without a token or offline."""
    if not args.push_to_hub:
        return
    from huggingface_hub import constants, get_token

    if constants.is_offline_mode():
        raise ValueError("push_to_hub needs the Hub, and HF_HUB_OFFLINE is set. Unset it.")
    if not (args.hub_token or get_token()):
        raise ValueError("push_to_hub needs a token. Use `hf auth login`, HF_TOKEN or hub_token.")


def checkpoint_to_resume(
    resume_from_checkpoint: str | bool | None,
    output_dir: str | Path,
    *,
    without: Sequence[str] = (),
    mirror: Mirror | None = None,
) -> str | bool | None:
    """What `--resume_from_checkpoint` asks a trainer for: a path, True (the newest whole one), or None to start anew.

    Raises: FileNotFoundError for no directory, CheckpointError for lost parts that are not in `without`.
    """
    wanted = str(resume_from_checkpoint).strip()
    if resume_from_checkpoint is None or wanted.lower() in ("", "false", "no", "none"):
        return None
    newest = wanted.lower() in ("true", "yes")
    if newest and mirror:
        on_main(PartialState(), lambda: mirror.fetch(Path(output_dir)))
    if newest and not checkpoints_in(output_dir):
        places = " or ".join(str(place) for place in (output_dir, mirror) if place)
        print(f"No complete checkpoint in {places}: starting from the beginning.")
        return None
    checkpoint_to_load(newest or wanted, output_dir, without=without, quick=True)
    return newest or wanted


def check_processes(args: TrainingArguments) -> None:
    """Raise ValueError if processes are unconnected or do not shard, which accelerate (1.15) hides on CPUs."""
    started = int(os.environ.get("WORLD_SIZE") or 1)
    if args.world_size != started:
        raise ValueError(f"{started} processes are not connected. On a CPU use --accelerate_config cpu.")
    kind = getattr(getattr(args.distributed_state, "distributed_type", None), "value", "NO")
    for variable, name in (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")):
        if os.environ.get(variable, "false").lower() in ("1", "true", "yes") and kind == "MULTI_CPU":
            raise ValueError(f"{name} does not shard over CPU processes. Use --accelerate_config cpu.")
