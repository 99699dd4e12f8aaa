"""Training on a CPU keeps freed memory in the process, unless the environment says how memory is allocated."""

import platform
import subprocess
import sys

import pytest

from trl.scripts import env
from trl.scripts.env import system_information

FAULTS = """
import resource, torch
from trl.scripts.env import keep_freed_memory
assert keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(1 << 20)  # 4 MiB
before = faults()
for _ in range(50): torch.ones(1 << 20)
print(faults() - before)
"""


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in env._VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")
def test_freed_tensors_are_not_given_back_to_the_system():
    line = [sys.executable, "-c", FAULTS]
    faults = int(subprocess.run(line, capture_output=True, text=True, check=True).stdout)
    assert faults < 0.25 * 50 * (4 << 20) // 4096  # without: each page of each tensor


def test_the_environment_wins_and_env_says_so(monkeypatch):
    assert "keep freed blocks below 32 MiB" in system_information()["Memory allocator"] or (
        platform.libc_ver()[0] != "glibc"
    )
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    assert not env.keep_freed_memory()
    if platform.libc_ver()[0] == "glibc":
        assert "MALLOC_TRIM_THRESHOLD_=1000000" in system_information()["Memory allocator"]
