import pytest
import torch

from trl.options.training import default_bf16
from trl.trainer.sft_config import SFTConfig


@pytest.fixture
def bf16_accelerator(monkeypatch):
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)


@pytest.mark.parametrize(
    ("launched", "given", "expected"),
    [
        ({}, {}, True), ({}, {"use_cpu": True}, False), ({}, {"fp16": True}, False),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {}, True), ({"ACCELERATE_MIXED_PRECISION": "fp16"}, {}, False),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, {}, False), ({"ACCELERATE_USE_CPU": "true"}, {}, False),
    ],
)  # fmt: skip
def test_bf16_where_the_accelerator_has_it_unless_something_else_was_chosen(
    bf16_accelerator, monkeypatch, launched, given, expected
):
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert default_bf16(**{"use_cpu": False, "fp16": False, **given}) is expected


@pytest.mark.skipif(torch.accelerator.is_available(), reason="about machines without an accelerator")
def test_no_bf16_without_an_accelerator():
    assert default_bf16(use_cpu=False, fp16=False) is False


@pytest.mark.parametrize("use_cpu", [True, False])
def test_bf16_none_is_never_an_error(tmp_path, use_cpu):
    args = SFTConfig(str(tmp_path), use_cpu=use_cpu)
    assert args.bf16 is default_bf16(use_cpu=use_cpu, fp16=False)


def test_explicit_precision_is_kept(tmp_path, bf16_accelerator):
    assert SFTConfig(str(tmp_path), bf16=True, use_cpu=True).bf16 is True
    for name in ("fp16", "fp16_full_eval"):
        with pytest.raises(ValueError, match=r"fp16 needs a GPU.*Set bf16 and use_cpu, or leave it out"):
            SFTConfig(str(tmp_path), use_cpu=True, **{name: True})
