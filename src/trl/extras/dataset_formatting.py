"""Known import path; the code is in `trl.data.formatting`."""

from trl.data.formatting import (
    conversations_formatting_function,
    get_formatting_func_from_dataset,
    instructions_formatting_function,
)

__all__ = [
    "conversations_formatting_function",
    "get_formatting_func_from_dataset",
    "instructions_formatting_function",
]
