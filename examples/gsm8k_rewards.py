"""Rewards for GSM8K: solutions in the form of its own, and solutions whose number is right.

    trl grpo --model_name_or_path my-model --dataset_name openai/gsm8k --dataset_config main --column_mapping question=prompt \
        --reward_funcs examples.gsm8k_rewards.in_form examples.gsm8k_rewards.is_right --output_dir runs/problems/grpo

Rows have the question as `prompt` and a solution as `answer`. Completions may be texts or messages.
"""

import re
from typing import Any

from trl.rewards.ready_made import content_of

STEP = r"[^\n]*<<[^<>\n=]+=[^<>\n=]+>>[^\n]*\n"
IN_FORM = re.compile(rf"(?:{STEP})+####\s*-?[\d,]*\.?\d+\s*")
LAST_LINE = re.compile(r"(?:^|\n)####\s*(-?[\d,]*\.?\d+)\s*\Z")


def in_form(completions: list[Any], **columns: Any) -> list[float]:
    """1 for lines that each hold a calculation `<<48/2=24>>` and a last line `#### 24`, 0 for any other, cut ones too.

    A last line alone is not enough: a model that is paid for it writes nothing else.
    """
    return [float(IN_FORM.fullmatch(content_of(completion)) is not None) for completion in completions]


def is_right(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 for a solution that ends with the number of the data set's solution, 0 for any other."""
    said = [last_number(content_of(completion)) for completion in completions]
    right = [last_number(solution) for solution in answer]
    return [float(one is not None and one == other) for one, other in zip(said, right, strict=True)]


def last_number(text: str) -> float | None:
    """The number behind the #### of the last line."""
    found = LAST_LINE.search(text)
    return float(found.group(1).replace(",", "")) if found else None
