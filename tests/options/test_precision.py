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


def test_bf16_on_an_accelerator_that_has_it(bf16_accelerator):
    assert default_bf16(use_cpu=False, fp16=False) is True


def test_float32_when_told_to_use_the_cpu_or_fp16(bf16_accelerator):
    assert default_bf16(use_cpu=True, fp16=False) is False
    assert default_bf16(use_cpu=False, fp16=True) is False


@pytest.mark.parametrize(
    ("launched", "expected"), [("no", True), ("bf16", True), ("fp16", False), ("fp8", False)]
)
def test_what_accelerate_launch_was_told_wins(bf16_accelerator, monkeypatch, launched, expected):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    assert default_bf16(use_cpu=False, fp16=False) is expected


def test_float32_when_accelerate_launch_was_told_to_use_the_cpu(bf16_accelerator, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert default_bf16(use_cpu=False, fp16=False) is False


@pytest.mark.skipif(torch.accelerator.is_available(), reason="about machines without an accelerator")
def test_no_bf16_without_an_accelerator():
    assert default_bf16(use_cpu=False, fp16=False) is False


@pytest.mark.parametrize("use_cpu", [True, False])
def test_bf16_none_is_never_an_error(tmp_path, use_cpu):
    args = SFTConfig(str(tmp_path), use_cpu=use_cpu)
    assert args.bf16 is default_bf16(use_cpu=use_cpu, fp16=False)


def test_explicit_bf16_on_the_cpu_is_kept(tmp_path):
    assert SFTConfig(str(tmp_path), bf16=True, use_cpu=True).bf16 is True


def test_explicit_fp16_keeps_bf16_off(tmp_path, bf16_accelerator):
    args = SFTConfig(str(tmp_path), fp16=True, use_cpu=True)
    assert (args.fp16, args.bf16) == (True, False)
