"""Configuration of supervised fine-tuning."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from transformers import TrainingArguments

from trl.options.batching import Packing, PadMultiple
from trl.options.checks import check_one_of, warn_caller
from trl.options.dataset import ChatTemplate, PadToken, Shuffling, TextDataset
from trl.options.docs import documented
from trl.options.groups import changed_default
from trl.options.memory import Offloading
from trl.options.model import ModelInit
from trl.options.training import TrainingDefaults

SFTLoss = Literal["nll", "dft"]


@documented
@dataclass
class SFTConfig(
    Offloading,
    PadMultiple,
    Packing,
    Shuffling,
    PadToken,
    ChatTemplate,
    TextDataset,
    ModelInit,
    TrainingDefaults,
):
    """Settings of `SFTTrainer`: those of `transformers.TrainingArguments` and the ones below.

    Example:
        >>> from trl import SFTConfig
        >>> args = SFTConfig("my-model", max_length=2048, packing=True, use_cpu=True)
        >>> args.learning_rate, args.bf16, args.packing_strategy
        (2e-05, False, 'bfd')
    """

    learning_rate: float = changed_default(TrainingArguments, "learning_rate", 2e-5)
    completion_only_loss: bool | None = field(
        default=None,
        metadata={
            "help": "Train on the completion's tokens only. None: yes for prompt-completion rows, no for plain text.",
            "nargs": "?",
            "const": True,
        },
    )
    assistant_only_loss: bool = field(
        default=False,
        metadata={"help": "Train on the assistant's turns only (conversations), each with its stop token."},
    )
    loss_type: SFTLoss = field(
        default="nll",
        metadata={
            "help": "Loss of a token with probability p: 'nll' is -log p, 'dft' (dynamic fine-tuning) is -p log p with "
            "p held constant as a weight. Averaged over all trained tokens of an optimiser step."
        },
    )
    max_seq_length: int | None = field(default=None, metadata={"help": "Deprecated name of max_length."})

    def check(self) -> None:
        self._move_max_seq_length()
        super().check()
        check_one_of("loss_type", self.loss_type, get_args(SFTLoss))

    def _move_max_seq_length(self) -> None:
        if self.max_seq_length is None:
            return
        if self.max_length not in (self.max_seq_length, type(self).max_length):
            raise ValueError(
                f"max_length={self.max_length} and max_seq_length={self.max_seq_length} disagree. max_seq_length is "
                "the old name of max_length: pass max_length only."
            )
        warn_caller("`max_seq_length` is now called `max_length`: pass max_length instead.", FutureWarning)
        self.max_length, self.max_seq_length = self.max_seq_length, None
