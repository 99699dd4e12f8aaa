import dataclasses
import json
import warnings

import pytest
from transformers import HfArgumentParser, TrainingArguments
from transformers.training_args import OptimizerNames

from trl.trainer.sft_config import SFTConfig


def config(tmp_path, **given):
    return SFTConfig(str(tmp_path), use_cpu=True, **given)


@pytest.mark.parametrize(
    ("older", "place", "value"),
    [
        ({"warmup_ratio": 0.1}, "warmup_steps", 0.1),
        ({"evaluation_strategy": "epoch"}, "eval_strategy", "epoch"),
        ({"group_by_length": True}, "train_sampling_strategy", "group_by_length"),
        ({"adafactor": True}, "optim", OptimizerNames.ADAFACTOR),
        ({"include_inputs_for_metrics": True}, "include_for_metrics", ["inputs"]),
        ({"push_to_hub_model_id": "me/model"}, "hub_model_id", "me/model"),
        ({"push_to_hub_model_id": "model", "push_to_hub_organization": "us"}, "hub_model_id", "us/model"),
        ({"push_to_hub_token": "secret"}, "hub_token", "secret"),
        ({"per_gpu_train_batch_size": 3}, "per_device_train_batch_size", 3),
        ({"half_precision_backend": "auto", "fp16_opt_level": "O1"}, None, None),
        ({"fsdp_min_num_params": 10, "past_index": -1, "ray_scope": "last"}, None, None),
        ({"overwrite_output_dir": True}, None, None),
        ({"save_safetensors": True, "logging_dir": "logs"}, None, None),
    ],
)
def test_arguments_of_transformers_4_move_with_one_warning(tmp_path, older, place, value):
    with pytest.warns(FutureWarning, match="deprecated settings") as caught:
        args = config(tmp_path, **older)
    assert len(caught) == 1
    assert all(f"{name} -> {place or 'nothing'}" in str(caught[0].message) for name in older)
    assert all(getattr(args, name) is None for name in older)
    if place:
        assert getattr(args, place) == value


def test_a_warmup_ratio_beyond_its_range_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="warmup_ratio"):
        config(tmp_path, warmup_ratio=3)


def test_max_seq_length_moves_with_one_warning(tmp_path):
    with pytest.warns(FutureWarning, match="max_seq_length -> max_length") as caught:
        args = config(tmp_path, max_seq_length=64)
    assert (args.max_length, args.max_seq_length) == (64, None)
    assert [entry.filename for entry in caught if entry.category is FutureWarning] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dataclasses.replace(args, seed=1).max_length == 64


def test_checkpointing_is_non_reentrant_unless_told_otherwise(tmp_path):
    given = {"every_n_layers": 2}
    assert config(tmp_path).gradient_checkpointing_kwargs == {"use_reentrant": False}
    merged = config(tmp_path, gradient_checkpointing_kwargs=given).gradient_checkpointing_kwargs
    assert merged == {"use_reentrant": False, "every_n_layers": 2}
    assert given == {"every_n_layers": 2}
    reentrant = config(tmp_path, gradient_checkpointing_kwargs='{"use_reentrant": true}')
    assert reentrant.gradient_checkpointing_kwargs == {"use_reentrant": True}
    assert config(tmp_path, gradient_checkpointing=False).gradient_checkpointing_kwargs is None


IS_RENAMED = "activation_checkpointing" in {field.name for field in dataclasses.fields(TrainingArguments)}
CHECKPOINTING_NAMES = ["gradient_checkpointing", *["activation_checkpointing"] * IS_RENAMED]  # since 5.23


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("name", CHECKPOINTING_NAMES)
def test_every_name_of_checkpointing_sets_all_of_them(tmp_path, name):
    off = config(tmp_path, **{name: False})
    fourth = config(tmp_path, **{f"{name}_kwargs": {"every_n_layers": 4}})
    for each in CHECKPOINTING_NAMES:
        assert getattr(off, each) is False and getattr(config(tmp_path), each) is True
        assert getattr(fourth, f"{each}_kwargs") == {"use_reentrant": False, "every_n_layers": 4}


def test_dicts_survive_to_dict_and_vocabulary_tokens_are_not_secret(tmp_path):
    import torch

    args = config(
        tmp_path,
        model_init_kwargs={"dtype": torch.bfloat16},
        pad_token="<pad>",
        eos_token="<eos>",
        hub_token="secret",
    )
    plain = args.to_dict()
    assert args.model_init_kwargs == {"dtype": torch.bfloat16}
    assert plain["model_init_kwargs"] == {"dtype": "bfloat16"}
    assert (plain["pad_token"], plain["eos_token"], plain["hub_token"]) == ("<pad>", "<eos>", "<HUB_TOKEN>")
    assert json.loads(args.to_json_string())["max_length"] == 1024


def parse(*line):
    parser = HfArgumentParser(SFTConfig)  # pyright: ignore[reportArgumentType]
    return parser.parse_args_into_dataclasses(["--use_cpu", *line], look_for_args_file=False)[0]


def test_a_setting_of_older_data_sets_is_taken_with_a_warning(tmp_path):
    with pytest.warns(FutureWarning, match="'append_concat_token'.* has no effect") as caught:
        args = config(tmp_path, dataset_kwargs={"append_concat_token": False, "add_special_tokens": False})
    assert args.dataset_kwargs == {"add_special_tokens": False}
    assert caught[0].filename == __file__
    with pytest.warns(FutureWarning):
        assert config(tmp_path, dataset_kwargs='{"append_concat_token": true}').dataset_kwargs == {}
