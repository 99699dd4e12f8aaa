"""Dialogues written out as text, such as hh-rlhf's, as prompt and answers."""

from collections.abc import Mapping
from typing import Any

from trl.data.formats import common_prefix_length


def split_dialogue(example: Mapping[str, Any], marker: str = "\n\nAssistant:") -> dict[str, str]:
    """A pair of whole dialogues as `prompt`, `chosen` and `rejected`; for `Dataset.map`.

    The prompt ends behind the last `marker` up to which both are the same: the last turn's, or an earlier one's where the
    dialogues part before.

    Raises: ValueError where they share no marker.

    >>> chosen, rejected = "Human: Hi\\n\\nAssistant: Hello.", "Human: Hi\\n\\nAssistant: Go away."
    >>> split_dialogue({"chosen": chosen, "rejected": rejected})
    {'prompt': 'Human: Hi\\n\\nAssistant:', 'chosen': ' Hello.', 'rejected': ' Go away.'}
    """
    chosen, rejected = example["chosen"], example["rejected"]
    shared = chosen[: common_prefix_length(chosen, rejected)]
    start = shared.rfind(marker)
    if start < 0:
        raise ValueError(
            f"chosen {chosen[:40]!r}... and rejected {rejected[:40]!r}... share no {marker!r}, expected dialogues with the same "
            "beginning. Give the text that opens the assistant's turns, or filter the row out."
        )
    end = start + len(marker)
    return {"prompt": chosen[:end], "chosen": chosen[end:], "rejected": rejected[end:]}
