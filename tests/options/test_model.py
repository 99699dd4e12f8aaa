import dataclasses
import warnings

import pytest

from trl.options.model import ModelConfig


def test_every_field_has_a_help_text():
    assert all(field.metadata["help"] for field in dataclasses.fields(ModelConfig))


def test_torch_dtype_moves_to_dtype_with_one_warning():
    with pytest.warns(FutureWarning, match="torch_dtype -> dtype") as caught:
        config = ModelConfig(torch_dtype="bfloat16")
    assert (config.dtype, config.torch_dtype) == ("bfloat16", None)
    assert len(caught) == 1 and caught[0].filename == __file__


def test_torch_dtype_that_contradicts_dtype_is_an_error():
    with pytest.raises(ValueError, match="disagree"):
        ModelConfig(dtype="float32", torch_dtype="bfloat16")


def test_a_single_target_module_is_unwrapped():
    assert ModelConfig(use_peft=True, lora_target_modules=["all-linear"]).lora_target_modules == "all-linear"
    assert ModelConfig(use_peft=True, lora_target_modules=["q_proj"]).lora_target_modules == ["q_proj"]
    two = ModelConfig(use_peft=True, lora_target_modules=["q_proj", "v_proj"])
    assert two.lora_target_modules == ["q_proj", "v_proj"]
    assert dataclasses.replace(two, lora_r=4).lora_target_modules == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"load_in_8bit": True, "load_in_4bit": True}, "cannot both be True"),
        ({"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type must be one of 'nf4', 'fp4'"),
        ({"dtype": "fp32"}, "dtype must be one of 'auto'"),
        ({"use_peft": True, "lora_r": 0}, "lora_r must be a whole number >= 1, got 0"),
        ({"use_peft": True, "lora_dropout": 1.0}, r"lora_dropout must be in \[0, 1\), got 1\.0"),
    ],
)
def test_bad_values(given, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**given)


def test_lora_settings_without_use_peft_warn_once():
    with pytest.warns(UserWarning, match="lora_r=8, use_dora=True has no effect") as caught:
        ModelConfig(lora_r=8, use_dora=True)
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ModelConfig(use_peft=True, lora_r=8)
