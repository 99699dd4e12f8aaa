"""Trainer callbacks. Public names are lazy."""

from typing import TYPE_CHECKING

from trl._lazy import attach

_NAMES = {
    "BEMACallback": "trl.trainer.callbacks.bema",
    "LogCompletionsCallback": "trl.trainer.callbacks.log_completions",
    "RichProgressCallback": "trl.trainer.callbacks.rich_progress",
    "SyncRefModelCallback": "trl.trainer.callbacks.sync_ref_model",
    "WeaveCallback": "trl.trainer.callbacks.weave",
}

if TYPE_CHECKING:
    from trl.trainer.callbacks.bema import BEMACallback as BEMACallback
    from trl.trainer.callbacks.log_completions import LogCompletionsCallback as LogCompletionsCallback
    from trl.trainer.callbacks.rich_progress import RichProgressCallback as RichProgressCallback
    from trl.trainer.callbacks.sync_ref_model import SyncRefModelCallback as SyncRefModelCallback
    from trl.trainer.callbacks.weave import WeaveCallback as WeaveCallback

__getattr__, __dir__, __all__ = attach(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
