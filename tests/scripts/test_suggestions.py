import pytest

from trl.scripts.suggestions import did_you_mean

NAMES = [
    "lr_scheduler_type", "save_only_model", "model_init_kwargs", "model_name_or_path", "datasets", "dataset_name",
    "num_train_epochs", "per_device_train_batch_size", "learning_rate", "loss", "report_to",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("--learning-rat", "--learning_rate"),
        ("--Epoch", "--num_train_epochs"),
        ("--lr", "--learning_rate or --lr_scheduler_type"),
        ("--modl", "--model_init_kwargs or --model_name_or_path or --save_only_model"),
        ("--dataset", "--datasets or --dataset_name"),
        ("--batch_size", "--per_device_train_batch_size"),
    ],
)
def test_the_nearest_name_and_then_those_that_it_abbreviates(name, expected):
    assert did_you_mean(name, NAMES, prefix="--") == f" Did you mean {expected}?"


@pytest.mark.parametrize("name", ["--zzz", "--", "-x", ""])
def test_no_suggestion_for_what_looks_like_nothing(name):
    assert did_you_mean(name, NAMES) == ""
