"""Configuration of supervised fine-tuning."""

from dataclasses import dataclass
from typing import Any, Literal

from transformers import TrainingArguments

from trl.options.checks import warn_caller
from trl.options.groups import documented, moved, option, same
from trl.options.shared import shared
from trl.options.training import SequenceOptions

SFTLoss = Literal["nll", "dft"]
PackingStrategy = Literal["bfd", "wrapped"]


@documented
@dataclass
class SFTConfig(SequenceOptions):
    """Settings of `SFTTrainer`: those of `transformers.TrainingArguments` and the ones below.

    Example:
        >>> from trl import SFTConfig
        >>> args = SFTConfig("my-model", max_length=2048, packing=True, use_cpu=True)
        >>> args.learning_rate, args.bf16, args.packing_strategy
        (2e-05, False, 'bfd')
    """

    learning_rate: float = same(TrainingArguments, "learning_rate", 2e-5)
    dataset_text_field: str = option("text", "Column that holds plain text (language-modelling rows).")
    dataset_kwargs: dict[str, Any] | str | None = option(
        None,
        'Settings of the preparation, as a dict or JSON object. {"skip_prepare_dataset": true} leaves rows as they '
        "are: they must be tokenised already.",
    )
    shuffle_dataset: bool = shared("shuffle_dataset")
    packing: bool = option(False, "Fill each training row with several sequences, up to max_length tokens.")
    packing_strategy: PackingStrategy = option(
        "bfd",
        "'bfd' (best fit, longest first) keeps sequences whole, cuts those longer than max_length and separates them "
        "in the attention; 'wrapped' chains all tokens and cuts them every max_length, mid-sequence too.",
    )
    eval_packing: bool | None = option(None, "Pack the evaluation rows. None: the same as packing.", flag=True)
    padding_free: bool = shared("padding_free")
    completion_only_loss: bool | None = option(
        None,
        "Train on the completion's tokens only. None: yes for prompt-completion rows, no for plain text.",
        flag=True,
    )
    assistant_only_loss: bool = option(
        False, "Train on the assistant's turns only (conversations), each with its stop token."
    )
    loss_type: SFTLoss = option(
        "nll",
        "Loss of a token with probability p: 'nll' is -log p, 'dft' (dynamic fine-tuning) is -p log p with p held "
        "constant as a weight. Averaged over all trained tokens of an optimiser step.",
    )
    max_seq_length: int | None = moved(to="max_length")

    def check(self) -> None:
        super().check()
        if isinstance(self.dataset_kwargs, dict) and "append_concat_token" in self.dataset_kwargs:
            self.dataset_kwargs = {k: v for k, v in self.dataset_kwargs.items() if k != "append_concat_token"}
            warn_caller(
                "dataset_kwargs={'append_concat_token': ...} has no effect: every row ends with its own stop token, "
                "packed or not. Leave it out.",
                FutureWarning,
            )
        for name in ("packing", "eval_packing"):
            if getattr(self, name) and self.max_length is None:
                raise ValueError(
                    f"{name}=True needs max_length, got max_length=None. Set it to the length of a packed row, in "
                    "tokens."
                )
