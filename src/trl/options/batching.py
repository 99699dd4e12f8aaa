"""Option groups for how sequences become batches."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from trl.options.checks import check_at_least, check_one_of
from trl.options.dataset import SequenceLength
from trl.options.groups import OptionGroup

PackingStrategy = Literal["bfd", "wrapped"]


@dataclass
class PadMultiple(OptionGroup):
    """Rounding of padded lengths."""

    pad_to_multiple_of: int | None = field(
        default=None,
        metadata={
            "help": "Pad every batch to a multiple of this many tokens. None: to its longest sequence."
        },
    )

    def check(self) -> None:
        super().check()
        check_at_least("pad_to_multiple_of", self.pad_to_multiple_of, minimum=1)


@dataclass
class PaddingFree(OptionGroup):
    """Batches without padding."""

    padding_free: bool = field(
        default=False,
        metadata={
            "help": "Lay the sequences of a batch end to end in one row of real tokens, each attending to itself only, "
            "instead of padding them to the longest. Same loss, less memory and time. Always on with "
            "packing_strategy 'bfd'."
        },
    )


@dataclass
class Packing(PaddingFree, SequenceLength):
    """Rows filled with several sequences."""

    packing: bool = field(
        default=False,
        metadata={"help": "Fill each training row with several sequences, up to max_length tokens."},
    )
    packing_strategy: PackingStrategy = field(
        default="bfd",
        metadata={
            "help": "How rows are filled. 'bfd' (best fit, longest first) keeps sequences whole, cuts those longer "
            "than max_length, and keeps them apart in the attention; 'wrapped' chains all tokens and cuts every "
            "max_length of them, mid-sequence too."
        },
    )
    eval_packing: bool | None = field(
        default=None,
        metadata={"help": "Pack the evaluation rows. None: as packing says.", "nargs": "?", "const": True},
    )

    def check(self) -> None:
        super().check()
        check_one_of("packing_strategy", self.packing_strategy, get_args(PackingStrategy))
        for name in ("packing", "eval_packing"):
            if getattr(self, name) and self.max_length is None:
                raise ValueError(
                    f"{name}=True needs max_length, got max_length=None. Set max_length to the length of a packed row, "
                    "in tokens."
                )
