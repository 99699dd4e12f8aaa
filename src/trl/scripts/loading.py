"""What a training script loads: its datasets, and how its model is loaded."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from datasets import Dataset, IterableDataset

from trl.data.formats import column_names
from trl.models.peft import get_kbit_device_map, get_quantization_config
from trl.options.model import ModelConfig
from trl.scripts.arguments import ScriptArguments
from trl.scripts.plain_parser import did_you_mean

if TYPE_CHECKING:
    from trl.data.mixtures import DatasetMixtureConfig

Rows = TypeVar("Rows", Dataset, IterableDataset)


def model_init_kwargs(
    model_args: ModelConfig, explicit: dict[str, Any] | str | None = None
) -> dict[str, Any]:
    """Keyword arguments of `from_pretrained`; those of `explicit` (the config's own) win.

    A quantised model is placed on this process's device while it loads.
    """
    named = {
        "revision": model_args.model_revision,
        "trust_remote_code": model_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    arguments = {name: value for name, value in named.items() if value is not None}
    quantization = get_quantization_config(model_args)
    if quantization is not None:
        arguments["quantization_config"] = quantization
        arguments["device_map"] = get_kbit_device_map()
    if isinstance(explicit, dict):
        arguments.update(explicit)
    return arguments


def load_train_and_eval(
    script_args: ScriptArguments,
    dataset_args: "DatasetMixtureConfig",
    *,
    renames: Mapping[str, str],
    evaluate: bool,
) -> tuple[Any, Any]:
    """The training dataset, and the evaluation dataset if `evaluate` (else None), columns renamed.

    They come from `dataset_name`, or from the mixture in `datasets`. With `test_split_size` the evaluation rows are drawn from the
    training split.

    Raises:
        ValueError: if no dataset is named, or both ways are used, or a split or a column does not exist.
        FileNotFoundError: if a local path does not exist.
    """
    if bool(script_args.dataset_name) == bool(dataset_args.datasets):
        given = "Both dataset_name and a mixture are" if dataset_args.datasets else "No dataset is"
        raise ValueError(
            f"{given} given. Give one dataset with --dataset_name, or a mixture as `datasets:` in the config file."
        )
    from trl.data.sources import load_source

    splits = {"dataset_train_split": script_args.dataset_train_split}
    if evaluate:
        splits["dataset_test_split"] = script_args.dataset_test_split
    mixture = mixed_splits(script_args, dataset_args)
    if mixture is not None and script_args.dataset_name:  # drawn from the training split
        splits = dict(zip(splits, ("train", "test"), strict=False))
    loaded: list[Any] = []
    rows: Any
    for option, split in splits.items():
        try:
            if mixture is None:
                rows = load_source(
                    str(script_args.dataset_name),
                    name=script_args.dataset_config,
                    split=split,
                    streaming=script_args.dataset_streaming,
                )
            elif split in mixture:
                rows = mixture[split]
            else:
                raise ValueError(
                    f"the mixture has no split {split!r}, it has {', '.join(map(repr, mixture))}."
                )
        except ValueError as error:
            tests = option == "dataset_test_split"
            way_out = " Or train without evaluation: --eval_strategy no." if tests else ""
            raise ValueError(f"{option}: {error}{way_out}") from error
        loaded.append(rename_columns(rows, renames, name=f"split {split!r}"))
    return loaded[0], (loaded[1] if evaluate else None)


def mixed_splits(script_args: ScriptArguments, dataset_args: "DatasetMixtureConfig") -> Any:
    """The splits of a mixture, or of `dataset_name` where evaluation rows are drawn from it; None where neither is asked for."""
    if not dataset_args.datasets and dataset_args.test_split_size is None:
        return None
    from trl.data.mixtures import DatasetConfig, get_dataset

    if script_args.dataset_name:
        path, config = script_args.dataset_name, script_args.dataset_config
        source = DatasetConfig(path, name=config, split=script_args.dataset_train_split)
        streaming = dataset_args.streaming or script_args.dataset_streaming
        dataset_args = replace(dataset_args, datasets=[source], streaming=streaming)
    return get_dataset(dataset_args)


def rename_columns(dataset: Rows, renames: Mapping[str, str], *, name: str) -> Rows:
    """The dataset with its columns renamed (old name -> new name); `name` is what errors call the dataset.

    Raises:
        ValueError: if a column to rename is missing, or a new name is taken by another column.
    """
    if not renames:
        return dataset
    present = column_names(dataset)
    if missing := [old for old in renames if old not in present]:
        raise ValueError(
            f"column_mapping renames `{missing[0]}`, which is no column of {name}: it has {', '.join(present)}."
            f"{did_you_mean(missing[0], present)}"
        )
    if taken := [new for new in renames.values() if new in present and new not in renames]:
        raise ValueError(f"column_mapping gives a column the name `{taken[0]}`, which {name} already has.")
    return dataset.rename_columns(dict(renames))
