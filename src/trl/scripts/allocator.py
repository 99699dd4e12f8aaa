"""glibc's thresholds for the memory of freed tensors, in processes that train on a CPU."""

import ctypes
import os
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of mallopt(3)
_MMAP_BYTES = 32 << 20  # the largest that glibc takes on 64 bits
_TRIM_BYTES = (1 << 31) - 1  # mallopt takes an int
_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> bool:
    """Let this process keep what it frees for its next tensors: the system would zero every page of it anew.

    Nothing is done, and False returned, without glibc and where the environment says how memory is allocated.
    """
    if platform.libc_ver()[0] != "glibc" or any(os.environ.get(name) for name in _VARIABLES):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(_MMAP_THRESHOLD, _MMAP_BYTES), mallopt(_TRIM_THRESHOLD, _TRIM_BYTES)])


def allocator() -> str:
    """What `trl env` says of it."""
    name, version = platform.libc_ver()
    if name != "glibc":
        return "not glibc's"
    given = [f"{each}={os.environ[each]}" for each in _VARIABLES if os.environ.get(each)]
    policy = "training commands on a CPU keep freed blocks below 32 MiB"
    return f"glibc {version}, {', '.join(given) or policy}"
