"""`trl env`: the machine and the versions in use, for bug reports; how glibc treats the memory of freed tensors."""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import yaml

from trl import __version__
from trl.scripts.plain_parser import PlainParser

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of mallopt(3)
_MMAP_BYTES = 32 << 20  # the largest that glibc takes on 64 bits
_TRIM_BYTES = (1 << 31) - 1  # mallopt takes an int
_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
REQUIRED = {
    "PyTorch": "torch", "Transformers": "transformers", "Accelerate": "accelerate", "Datasets": "datasets",
    "HF Hub": "huggingface_hub",
}  # fmt: skip
OPTIONAL = {
    "bitsandbytes": "bitsandbytes", "DeepSpeed": "deepspeed", "Diffusers": "diffusers", "Liger-Kernel": "liger_kernel",
    "Math-Verify": "math_verify", "OpenAI": "openai", "PEFT": "peft", "scikit-learn": "scikit-learn", "vLLM": "vllm",
}  # fmt: skip


def make_parser() -> PlainParser:
    return PlainParser(prog="trl env", description="Print versions and hardware, for bug reports.")


def main(argv: Sequence[str] | None = None) -> int:
    make_parser().parse_args(argv)
    print_env()
    return 0


def print_env() -> None:
    print("\nCopy-paste the following information when reporting an issue:\n")
    for name, value in system_information().items():
        print(f"- {name}: {value}")


def system_information() -> dict[str, str]:
    """What `trl env` prints, in its order."""
    commit = get_git_commit_hash("trl")
    information = {
        "Platform": platform.platform(),
        "Python version": platform.python_version(),
        "TRL version": __version__ + (f" (commit {commit[:7]})" if commit else ""),
        "Accelerator(s)": accelerators(),
    }
    information |= {f"{name} version": version(package) for name, package in REQUIRED.items()}
    information["Memory allocator"] = allocator()
    information["Accelerate config"] = accelerate_config()
    information |= {f"{name} version": version(package) for name, package in OPTIONAL.items()}
    return information


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def accelerators() -> str:
    """Names of the accelerators that PyTorch sees."""
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return "none (CPU)"
    name_of = getattr(torch.get_device_module(device), "get_device_name", lambda index: device.type.upper())
    return ", ".join(name_of(index) for index in range(torch.accelerator.device_count()))


def accelerate_config() -> str:
    """The settings that `accelerate config` saved as default, one per line."""
    from accelerate.commands.config.config_args import default_config_file

    if not Path(default_config_file).is_file():
        return "not found"
    settings = yaml.safe_load(Path(default_config_file).read_text(encoding="utf-8")) or {}
    return "".join(f"\n  - {name}: {value}" for name, value in settings.items())


def get_git_commit_hash(package_name: str) -> str | None:
    """Hash of the commit that a package runs from, or None if its files are not under Git (or it is not there)."""
    spec = importlib.util.find_spec(package_name)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin)
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None  # installed into an environment that happens to lie inside a checkout
    return _git(file.parent, "rev-parse", "HEAD")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.SubprocessError):
        return None


def keep_freed_memory() -> bool:
    """Let this process reuse freed memory without zeroed pages; False without glibc or with `_VARIABLES`."""
    if platform.libc_ver()[0] != "glibc" or any(os.environ.get(name) for name in _VARIABLES):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(_MMAP_THRESHOLD, _MMAP_BYTES), mallopt(_TRIM_THRESHOLD, _TRIM_BYTES)])


def allocator() -> str:
    """What `trl env` says of it."""
    library, version = platform.libc_ver()
    if library != "glibc":
        return "not glibc's"
    settings = [f"{name}={os.environ[name]}" for name in _VARIABLES if os.environ.get(name)]
    policy = "training commands on a CPU keep freed blocks below 32 MiB"
    return f"glibc {version}, {', '.join(settings) or policy}"
