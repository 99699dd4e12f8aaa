"""Names on the Hugging Face Hub: one message and no retries where it cannot be reached."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datasets import config as datasets_config
from huggingface_hub import constants, get_session

_TIMEOUT = 5.0  # seconds
_NO_CONNECTION = ("ConnectError", "ConnectTimeout", "ProxyError", "ConnectionError")
_REACHED: set[str] = set()  # endpoints that have answered this process


class HubUnreachable(FileNotFoundError):
    """A name is neither here nor in the cache, and the Hub cannot be reached."""


def may_be_on_hub(name: str) -> bool:
    """Whether `name` has the form of a Hub name (`owner/name` or `name`), which a local path may have too."""
    return not name.startswith((".", "/", "~")) and "\\" not in name and name.count("/") <= 1


def unreachable_reason() -> str | None:
    """Why the Hub cannot be reached, None where it can."""
    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"
    if constants.ENDPOINT in _REACHED:
        return None
    try:
        get_session().head(constants.ENDPOINT, timeout=_TIMEOUT)
    except Exception as error:  # which library's depends on the version of the Hub's client (2.4: httpx2)
        name = type(error).__name__
        return (str(error) or name) if name in _NO_CONNECTION else None  # else it is there, if slow
    _REACHED.add(constants.ENDPOINT)
    return None


@contextmanager
def loading_from_hub(name: str, kind: str) -> Iterator[None]:
    """Load `name`, a `kind` ("model", "dataset") that may be on the Hub, inside this block.

    Where the Hub cannot be reached, the cache alone is read: the client would retry each file five times. Raises:
    HubUnreachable where the Hub cannot be reached and the cache does not hold it.
    """
    is_remote = may_be_on_hub(name) and not Path(name).exists()
    reason = unreachable_reason() if is_remote else None
    if reason is None:
        yield
        return
    before = constants.HF_HUB_OFFLINE, datasets_config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets_config.HF_HUB_OFFLINE = True
    try:
        yield
    except OSError as error:
        option = "--repo-type dataset " if kind == "dataset" else ""
        if isinstance(error, HubUnreachable):  # of a name that this one refers to
            raise
        raise HubUnreachable(
            f"The {kind} '{name}' is not at {Path(name).absolute()}, not in the cache, and the Hub "
            f"({constants.ENDPOINT}) cannot be reached: {reason}. Give a local path, or download it first, on a "
            f"machine with a network: `hf download {option}{name} --local-dir FOLDER`."
        ) from error
    finally:
        constants.HF_HUB_OFFLINE, datasets_config.HF_HUB_OFFLINE = before
