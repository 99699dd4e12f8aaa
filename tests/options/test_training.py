"""Numbers that would stop a run late, or make it one of no steps, are refused when the config is built."""

import pytest

from trl import SFTConfig


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size"),
        ({"per_device_eval_batch_size": -1}, "per_device_eval_batch_size"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"learning_rate": -1e-4}, "learning_rate"),
        ({"max_steps": 0}, "max_steps"),
        ({"num_train_epochs": 0}, "num_train_epochs"),
        ({"num_train_epochs": -1, "max_steps": -1}, "num_train_epochs"),
    ],
)
def test_numbers_with_which_no_run_can_be_made(tmp_path, given, name):
    with pytest.raises(ValueError, match=f"{name}.* got"):
        SFTConfig(str(tmp_path), **given)


def test_numbers_that_are_unusual_and_fine(tmp_path):
    args = SFTConfig(str(tmp_path), learning_rate=0.0, num_train_epochs=0, max_steps=3)
    assert (args.learning_rate, args.max_steps) == (0.0, 3)
    assert SFTConfig(str(tmp_path), num_train_epochs=0.5, max_steps=-1).num_train_epochs == 0.5


def test_prefetching_without_workers_is_refused(tmp_path):
    with pytest.raises(ValueError, match="dataloader_prefetch_factor"):
        SFTConfig(str(tmp_path), dataloader_prefetch_factor=4)


def test_deepspeed_without_its_package_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr("trl.options.training.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install trl\[deepspeed\]"):
        SFTConfig(str(tmp_path), deepspeed={"zero_optimization": {"stage": 2}})
