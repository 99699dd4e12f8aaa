"""`TrainingArguments` with the defaults that all trainers of the library share."""

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from trl.options.checks import json_object
from trl.options.groups import changed_default
from trl.options.older import OlderTrainingArguments
from trl.options.precision import default_bf16


@dataclass
class TrainingDefaults(OlderTrainingArguments, TrainingArguments):
    """Training arguments with the library's defaults; every training config ends its bases with this class."""

    logging_steps: float = changed_default(TrainingArguments, "logging_steps", 10)
    bf16: bool | None = field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default=None,
        metadata={
            "help": "Train in bfloat16 mixed precision. None: yes on an accelerator that computes in bfloat16 (unless "
            "fp16 is set), float32 on a CPU. Always True or False once the config is built.",
            "nargs": "?",
            "const": True,
        },
    )
    gradient_checkpointing: bool = field(
        default=True,
        metadata={
            "help": "Keep only some activations for the backward pass and compute the others again: less memory for "
            "about one more forward pass of time. Non-reentrant unless gradient_checkpointing_kwargs says otherwise."
        },
    )

    def __post_init__(self) -> None:
        self.check()
        if self.bf16 is None:
            self.bf16 = default_bf16(use_cpu=self.use_cpu, fp16=self.fp16)
        if self.gradient_checkpointing:
            given = json_object("gradient_checkpointing_kwargs", self.gradient_checkpointing_kwargs)
            self.gradient_checkpointing_kwargs = {"use_reentrant": False, **(given or {})}
        super().__post_init__()

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values, secrets redacted.

        Unlike the method of `TrainingArguments`, it leaves dicts inside this config untouched (that one turns dtypes
        and quantisation configs in them into strings and dicts) and redacts no token that is part of the vocabulary.
        """
        snapshot = copy.copy(self)
        outside = {field.name for field in dataclasses.fields(TrainingArguments)}
        vocabulary = {}
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, dict):
                setattr(snapshot, entry.name, copy.deepcopy(value))
            elif entry.name.endswith("_token") and entry.name not in outside:
                vocabulary[entry.name] = value
        return {**super(TrainingDefaults, snapshot).to_dict(), **vocabulary}
