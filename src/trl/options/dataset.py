"""Option groups for what happens to a dataset before it is batched."""

from dataclasses import dataclass, field
from typing import Any

from trl.options.checks import check_at_least, json_object, warn_caller
from trl.options.groups import OptionGroup


@dataclass
class DatasetPreparation(OptionGroup):
    """How rows are prepared."""

    dataset_num_proc: int | None = field(
        default=None,
        metadata={"help": "Number of processes that prepare the dataset. None: this process does it."},
    )

    def check(self) -> None:
        super().check()
        check_at_least("dataset_num_proc", self.dataset_num_proc, minimum=1)


@dataclass
class TextDataset(DatasetPreparation):
    """Where text is found in a row, and how much of the preparation is left to the user."""

    dataset_text_field: str = field(
        default="text",
        metadata={"help": "Name of the column that holds plain text (language-modelling rows)."},
    )
    dataset_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": 'Settings of the dataset preparation, as a dict or JSON object. {"skip_prepare_dataset": true} '
            "leaves the rows as they are: they must be tokenised already."
        },
    )

    def check(self) -> None:
        super().check()
        settings = json_object("dataset_kwargs", self.dataset_kwargs)
        if settings and "append_concat_token" in settings:
            settings = {name: value for name, value in settings.items() if name != "append_concat_token"}
            warn_caller(
                "dataset_kwargs={'append_concat_token': ...} has no effect: every row ends with its own stop token, packed or "
                "not. Leave it out.",
                FutureWarning,
            )
        self.dataset_kwargs = settings


@dataclass
class Shuffling(OptionGroup):
    """The order of the rows before packing and sampling."""

    shuffle_dataset: bool = field(
        default=False,
        metadata={"help": "Shuffle the rows once, with `seed`, before they are packed and sampled."},
    )


@dataclass
class PadToken(OptionGroup):
    """The padding token."""

    pad_token: str | None = field(
        default=None,
        metadata={
            "help": "Token used for padding. None: the tokenizer's padding token, or its end-of-sequence token if it "
            "has none. Padding is masked by position, so the choice never hides a trained token."
        },
    )


@dataclass
class ChatTemplate(OptionGroup):
    """How conversations become text, and which token ends them."""

    chat_template_path: str | None = field(
        default=None,
        metadata={
            "help": "Where to take the chat template from: a Jinja file, or a directory or Hub name of a tokenizer "
            "(whose added tokens are cloned too, the embeddings growing with them). None: the tokenizer's own."
        },
    )
    eos_token: str | None = field(
        default=None,
        metadata={"help": "Token that ends a sequence. None: the tokenizer's end-of-sequence token."},
    )


@dataclass
class SequenceLength(OptionGroup):
    """The length at which sequences are cut."""

    max_length: int | None = field(
        default=1024,
        metadata={
            "help": "Longest sequence, in tokens: longer ones lose their end, and packing fills rows of this length. "
            "None: nothing is cut."
        },
    )

    def check(self) -> None:
        super().check()
        hint = "Use None to keep sequences whole."
        check_at_least("max_length", self.max_length, minimum=1, hint=hint)
