"""The machine and the versions in use, to paste into a bug report: `trl env`."""

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import yaml

from trl.scripts.allocator import allocator
from trl.scripts.checkout import get_git_commit_hash
from trl.scripts.plain_parser import PlainParser

REQUIRED = {
    "PyTorch": "torch",
    "Transformers": "transformers",
    "Accelerate": "accelerate",
    "Datasets": "datasets",
    "HF Hub": "huggingface_hub",
}
OPTIONAL = {
    "bitsandbytes": "bitsandbytes",
    "DeepSpeed": "deepspeed",
    "Diffusers": "diffusers",
    "Liger-Kernel": "liger_kernel",
    "Math-Verify": "math_verify",
    "OpenAI": "openai",
    "PEFT": "peft",
    "scikit-learn": "scikit-learn",
    "vLLM": "vllm",
}


def make_parser() -> PlainParser:
    """The options of `trl env`."""
    return PlainParser(prog="trl env", description="Print versions and hardware, for bug reports.")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the system information; returns the exit status."""
    make_parser().parse_args(argv)
    print_env()
    return 0


def print_env() -> None:
    """Print the system information."""
    print("\nCopy-paste the following information when reporting an issue:\n")
    for name, value in system_information().items():
        print(f"- {name}: {value}")


def system_information() -> dict[str, str]:
    """What `trl env` prints, in its order."""
    information = {
        "Platform": platform.platform(),
        "Python version": platform.python_version(),
        "TRL version": trl_version(),
        "Accelerator(s)": accelerators(),
    }
    information |= {f"{name} version": version(package) for name, package in REQUIRED.items()}
    information["Memory allocator"] = allocator()
    information["Accelerate config"] = accelerate_config()
    information |= {f"{name} version": version(package) for name, package in OPTIONAL.items()}
    return information


def version(package: str) -> str:
    """Version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def trl_version() -> str:
    """The library's version, with the commit (seven characters) where it runs from a checkout."""
    commit = get_git_commit_hash("trl")
    return version("trl") + (f"+{commit[:7]}" if commit else "")


def accelerators() -> str:
    """Names of the accelerators that PyTorch sees."""
    import torch

    if torch.cuda.is_available():
        return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    if torch.backends.mps.is_available():
        return "MPS"
    if torch.xpu.is_available():
        return ", ".join(torch.xpu.get_device_name(index) for index in range(torch.xpu.device_count()))
    return "none (CPU)"


def accelerate_config() -> str:
    """The settings that `accelerate config` saved as default, one per line."""
    home = os.environ.get(
        "HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    )
    path = Path(home).expanduser() / "accelerate" / "default_config.yaml"
    if not path.is_file():
        return "not found"
    settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    return "".join(f"\n  - {name}: {value}" for name, value in settings.items())
