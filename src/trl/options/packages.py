"""Optional packages: which are installed, and the warnings about them. Imports none of them."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec

from packaging.version import Version

LIGER_KERNEL_MIN_VERSION = "0.6.4"


class TRLExperimentalWarning(UserWarning):
    """Warns of features whose interface may change; nothing in this library raises it."""


class OptionalDependencyNotAvailable(BaseException):
    """An optional package is missing; for programs that raise it themselves."""


def _installed(package: str) -> Version:
    """The installed version without its suffixes (`.dev0`, `+cpu`); 0 where there is none."""
    try:
        return Version(Version(metadata.version(package)).base_version)
    except metadata.PackageNotFoundError:
        return Version("0")


def _check_for(package: str) -> Callable[[], bool]:
    def is_available() -> bool:
        return find_spec(package) is not None

    is_available.__doc__ = f"Whether `{package}` is installed."
    return is_available


is_bitsandbytes_available = _check_for("bitsandbytes")
is_deepspeed_available = _check_for("deepspeed")
is_diffusers_available = _check_for("diffusers")
is_fastapi_available = _check_for("fastapi")
is_jmespath_available = _check_for("jmespath")
is_joblib_available = _check_for("joblib")
is_llm_blender_available = is_llmblender_available = _check_for("llm_blender")
is_math_verify_available = _check_for("math_verify")
is_mergekit_available = _check_for("mergekit")
is_peft_available = _check_for("peft")
is_pydantic_available = _check_for("pydantic")
is_requests_available = _check_for("requests")
is_rich_available = _check_for("rich")
is_torchvision_available = _check_for("torchvision")
is_unsloth_available = _check_for("unsloth")
is_uvicorn_available = _check_for("uvicorn")
is_vllm_ascend_available = _check_for("vllm_ascend")
is_vllm_available = _check_for("vllm")
is_wandb_available = _check_for("wandb")
is_weave_available = _check_for("weave")


def is_liger_kernel_available(min_version: str = LIGER_KERNEL_MIN_VERSION) -> bool:
    """Whether `liger-kernel` is installed, `min_version` or later. No trainer needs it."""
    return _installed("liger-kernel") >= Version(min_version)


def is_transformers_greater_than(version: str) -> bool:
    """Whether a later version of transformers than this one is installed."""
    return _installed("transformers") > Version(version)


def is_torch_greater_2_0() -> bool:
    """Whether torch is 2.0 or later."""
    return _installed("torch") >= Version("2.0")


def is_accelerate_greater_20_0() -> bool:
    """Whether accelerate is 0.20 or later."""
    return _installed("accelerate") >= Version("0.20")


@contextmanager
def suppress_warning(category: type[Warning]) -> Iterator[None]:
    """A block in which warnings of one category are not shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=category)
        yield


def suppress_experimental_warning():
    """A block without `TRLExperimentalWarning`."""
    return suppress_warning(TRLExperimentalWarning)
