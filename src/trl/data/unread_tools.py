"""Tools that rows have, or are given, and that their prompts would not show."""

import logging
import re
from typing import Any

from datasets import Dataset

from trl.data.formats import column_names
from trl.data.rendering import ProcessingClass, template_source

logger = logging.getLogger(__name__)

_READS_TOOLS = re.compile(r"\btools\b")
_ANY_TOOL: list = [{}]


def warn_of_unread_tools(
    dataset: Any, processing_class: ProcessingClass, *, name: str, is_chat: bool = True, tools: Any = None
) -> None:
    """Say how many rows have tools that reach no prompt: those of their column `tools`, or `tools` given for all.

    Conversations alone show tools, where their chat template reads them. A column of tools beside text or tokens is
    nothing to warn of: they may be in the text already.
    """
    if is_chat and _READS_TOOLS.search(template_source(processing_class, tools=_ANY_TOOL)):
        return
    if tools:
        rows = "all rows"
    elif is_chat and "tools" in column_names(dataset):
        rows = _rows_with_tools(dataset)
    else:
        return
    if rows:
        logger.warning(
            "%s dataset: %s have tools that their prompts do not show, because %s. Choose a chat template that renders "
            "'tools', or leave tools out.",
            name,
            rows,
            "the chat template reads none" if is_chat else "only conversations are rendered with tools",
        )


def _rows_with_tools(dataset: Any) -> str:
    """Which rows have tools, in words; of a stream the first one is looked at. Empty where none have."""
    if not isinstance(dataset, Dataset):
        return "rows" if _is_given(next(iter(dataset)).get("tools")) else ""
    count = sum(map(_is_given, dataset.with_format(None)["tools"]))
    return f"{count} of {len(dataset)} rows" if count else ""


def _is_given(tools: Any) -> bool:
    return bool(tools) and tools not in ("[]", "null")
