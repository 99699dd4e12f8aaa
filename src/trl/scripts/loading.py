"""Loading the datasets of a training script."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from datasets import Dataset, IterableDataset

from trl.data.formats import column_names
from trl.scripts.arguments import ScriptArguments
from trl.scripts.plain_parser import did_you_mean

if TYPE_CHECKING:
    from trl.data.mixtures import DatasetMixtureConfig

Rows = TypeVar("Rows", Dataset, IterableDataset)


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
    check_one_source(script_args, dataset_args)
    names = [script_args.dataset_train_split] + ([script_args.dataset_test_split] if evaluate else [])
    options = ["dataset_train_split", "dataset_test_split"]
    if dataset_args.datasets or dataset_args.test_split_size is not None:
        from trl.data.mixtures import DatasetConfig, get_dataset

        if script_args.dataset_name:
            path, config = script_args.dataset_name, script_args.dataset_config
            source = DatasetConfig(path, name=config, split=script_args.dataset_train_split)
            streaming = dataset_args.streaming or script_args.dataset_streaming
            dataset_args = replace(dataset_args, datasets=[source], streaming=streaming)
            names = ["train", "test"][: len(names)]
        mixture = get_dataset(dataset_args)
        loaded = [
            pick_split(mixture, name, option=option) for name, option in zip(names, options, strict=False)
        ]
    else:
        loaded = [
            load_split(script_args, name, option=option) for name, option in zip(names, options, strict=False)
        ]
    renamed = [
        rename_columns(rows, renames, name=f"split {name!r}")
        for rows, name in zip(loaded, names, strict=True)
    ]
    return renamed[0], (renamed[1] if evaluate else None)


def check_one_source(script_args: ScriptArguments, dataset_args: "DatasetMixtureConfig") -> None:
    """Raise `ValueError` unless the dataset is given in exactly one way."""
    if script_args.dataset_name and dataset_args.datasets:
        raise ValueError(
            f"dataset_name={script_args.dataset_name!r} and a mixture in datasets are both given. Use one: add the "
            "dataset to the mixture, or leave the mixture out."
        )
    if not script_args.dataset_name and not dataset_args.datasets:
        raise ValueError(
            "No dataset. Give one with --dataset_name, or a mixture as `datasets:` in the config file."
        )


def load_split(script_args: ScriptArguments, split: str, *, option: str) -> Any:
    """One split of `dataset_name`; `split` may be a slice such as `train[:100]`."""
    from trl.data.sources import load_source

    try:
        return load_source(
            str(script_args.dataset_name),
            name=script_args.dataset_config,
            split=split,
            streaming=script_args.dataset_streaming,
        )
    except ValueError as error:
        raise ValueError(f"{option}: {error}{remedy(option)}") from error


def pick_split(splits: Mapping[Any, Any], wanted: str, *, option: str) -> Any:
    """The split of a mixture called `wanted`.

    Raises:
        ValueError: naming the splits there are.
    """
    if wanted in splits:
        return splits[wanted]
    there = ", ".join(map(repr, splits))
    raise ValueError(f"{option}: the mixture has no split {wanted!r}, it has {there}.{remedy(option)}")


def remedy(option: str) -> str:
    """What else can be done where the split of an option does not exist."""
    if option != "dataset_test_split":
        return ""
    return " Or train without evaluation: --eval_strategy no."


def rename_columns(dataset: Rows, renames: Mapping[str, str], *, name: str) -> Rows:
    """The dataset with its columns renamed (old name -> new name); `name` is what errors call the dataset.

    Raises:
        ValueError: if a column to rename is missing, or a new name is taken by another column.
    """
    if not renames:
        return dataset
    present = column_names(dataset)
    for old in renames:
        if old not in present:
            raise ValueError(
                f"column_mapping renames `{old}`, which is no column of {name}: it has {', '.join(present)}."
                f"{did_you_mean(old, present)}"
            )
    taken = [new for new in renames.values() if new in present and new not in renames]
    if taken:
        raise ValueError(f"column_mapping gives a column the name `{taken[0]}`, which {name} already has.")
    return dataset.rename_columns(dict(renames))
