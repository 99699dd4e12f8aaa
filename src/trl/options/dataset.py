"""Option groups of trainers over rows of a data set."""

from dataclasses import dataclass
from typing import Any

from trl.options.groups import option
from trl.options.shared import shared
from trl.options.training import TrainingDefaults


@dataclass
class RowOptions(TrainingDefaults):
    """How the model is loaded, and how rows are prepared and cut."""

    model_init_kwargs: dict[str, Any] | str | None = shared("model_init_kwargs")
    dataset_num_proc: int | None = shared("dataset_num_proc")
    max_length: int | None = shared("max_length")


@dataclass
class SequenceOptions(RowOptions):
    """Special tokens, padding and memory, for SFT and reward models."""

    pad_token: str | None = shared("pad_token")
    chat_template_path: str | None = option(
        None,
        "Source of the chat template: a Jinja file, or a directory or Hub name of a tokenizer, whose added tokens are "
        "cloned too (the embeddings grow). None: the tokenizer's own.",
    )
    eos_token: str | None = option(
        None, "Token that ends a sequence. None: the tokenizer's end-of-sequence token."
    )
    pad_to_multiple_of: int | None = option(
        None, "Pad batches to a multiple of this many tokens. None: to the longest sequence.", ">= 1"
    )
    activation_offloading: bool = option(
        False,
        "Keep the activations of the backward pass in CPU memory: less accelerator memory for some copying. No effect "
        "on a CPU.",
    )
