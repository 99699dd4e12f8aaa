"""Option groups of learning from preferences: lengths, layout, the implicit reward, and the reference policy."""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from trl.options.checks import check_at_least, check_one_of, json_object, warn_caller
from trl.options.dataset import SequenceLength
from trl.options.groups import OptionGroup

TruncationMode = Literal["keep_end", "keep_start"]
PrefixSharingMode = Literal["auto", "true", "false", True, False]  # the words as a command line has them


@dataclass
class PromptLengths(SequenceLength):
    """The lengths at which prompts, completions and both together are cut."""

    max_prompt_length: int | None = field(
        default=512,
        metadata={
            "help": "Longest prompt, in tokens: of a longer one the end is kept, unless truncation_mode says otherwise. "
            "None: no limit."
        },
    )
    max_completion_length: int | None = field(
        default=None,
        metadata={"help": "Longest completion, in tokens: longer ones lose their end. None: no limit."},
    )

    def check(self) -> None:
        super().check()
        for name in ("max_prompt_length", "max_completion_length"):
            check_at_least(name, getattr(self, name), minimum=1, hint="Use None for no limit.")


@dataclass
class CompletionLengths(PromptLengths):
    """Lengths with a choice of which end is kept."""

    truncation_mode: TruncationMode = field(
        default="keep_end",
        metadata={"help": "Which end is kept of what is too long: 'keep_end' (the default) or 'keep_start'."},
    )

    def check(self) -> None:
        super().check()
        check_one_of("truncation_mode", self.truncation_mode, get_args(TruncationMode))

    def prompt_limit(self, *, is_encoder_decoder: bool) -> int | None:
        """`max_prompt_length`; None where its default is no less than `max_length`, which then limits prompts alone."""
        if is_encoder_decoder or not self._default_fills_length():
            return self.max_prompt_length
        return None

    def _default_fills_length(self) -> bool:
        limit, length = self.max_prompt_length, self.max_length
        if limit is None or length is None or limit != type(self).max_prompt_length:
            return False
        return limit >= length - 2  # places of KTO's begin token and eos


@dataclass
class PromptFirstLengths(CompletionLengths):
    """The same lengths, of which those of the parts act only where both together are too long."""

    max_prompt_length: int | None = field(
        default=512,
        metadata={
            "help": "Length to which a prompt is cut where it and its longer completion exceed max_length (with max_length "
            "None: wherever it is longer), in tokens; truncation_mode says which end is kept. Completions that are still "
            "too long keep their first max_length - max_prompt_length. The default is half of max_length where that is no larger. "
            "None: no limit."
        },
    )
    max_completion_length: int | None = field(
        default=None,
        metadata={
            "help": "Longest completion of an encoder-decoder, in tokens: longer ones lose their end. None: no limit. It "
            "does nothing to other models."
        },
    )

    def prompt_limit(self, *, is_encoder_decoder: bool) -> int | None:
        """`max_prompt_length`; half of `max_length` where its default would leave completions no room in that."""
        if is_encoder_decoder or not self._default_fills_length():
            return self.max_prompt_length
        return max(self.max_length // 2, 1)  # type: ignore[operator]


@dataclass
class PrefixSharing(OptionGroup):
    """Whether the completions of one prompt are laid out behind one copy of it."""

    prefix_sharing: PrefixSharingMode = field(
        default="auto",
        metadata={
            "help": "Run each prompt once for all of its completions: the same losses and gradients for less time and "
            "memory. 'auto': wherever the model can; True: or raise an error; False: every completion has a prompt of "
            "its own."
        },
    )

    def check(self) -> None:
        super().check()
        self.prefix_sharing = {"true": True, "false": False}.get(  # pyright: ignore[reportAttributeAccessIssue]
            str(self.prefix_sharing).lower(), self.prefix_sharing
        )
        check_one_of("prefix_sharing", self.prefix_sharing, get_args(PrefixSharingMode))


@dataclass
class Dropout(OptionGroup):
    """Dropout of the policy and the reference."""

    disable_dropout: bool = field(
        default=True,
        metadata={
            "help": "Train without dropout, so that policy and reference differ by their weights only."
        },
    )


@dataclass
class ImplicitReward(OptionGroup):
    """The scale of the implicit reward."""

    beta: float = field(
        default=0.1,
        metadata={
            "help": "Scale of the implicit reward, beta * log-ratio. A larger one keeps the policy closer to the "
            "reference."
        },
    )


@dataclass
class LabelSmoothing(OptionGroup):
    """Noise in the labels of pairs."""

    label_smoothing: float = field(
        default=0.0,
        metadata={
            "help": "Probability in [0, 0.5) that a pair's label is wrong (cDPO, robust DPO). 0: clean labels."
        },
    )


@dataclass
class EvaluationSamples(OptionGroup):
    """Completions written while evaluating."""

    generate_during_eval: bool = field(
        default=False,
        metadata={
            "help": "At each evaluation, complete a batch of prompts with the policy and the reference and log the table."
        },
    )


@dataclass
class OlderCollation(OptionGroup):
    """Names of padding that earlier levels had."""

    label_pad_token_id: int = field(
        default=-100,
        metadata={"help": "Label of untrained positions. Only -100 is supported."},
    )
    padding_value: int | None = field(
        default=None,
        metadata={
            "help": "Token id that fills padded positions. None: that of pad_token. Padding is masked by position."
        },
    )

    def check(self) -> None:
        super().check()
        if self.label_pad_token_id != -100:
            raise ValueError(
                f"label_pad_token_id must be -100, got {self.label_pad_token_id}. Leave it out: labels are masked by "
                "position."
            )


@dataclass
class EncoderDecoder(OptionGroup):
    """The kind of model."""

    is_encoder_decoder: bool | None = field(
        default=None,
        metadata={
            "help": "Whether the model is an encoder-decoder. None: as its config says.",
            "nargs": "?",
            "const": True,
        },
    )


@dataclass
class FusedLoss(OptionGroup):
    """Switches of the reference that always are on here."""

    use_liger_loss: bool | None = field(
        default=None,
        metadata={
            "help": "Deprecated: every loss is computed in chunks, without logits of the whole vocabulary.",
            "nargs": "?",
            "const": True,
        },
    )
    base_model_attribute_name: str = field(
        default="model",
        metadata={"help": "Deprecated: the decoder is found by itself."},
    )

    def check(self) -> None:
        super().check()
        if self.use_liger_loss:
            warn_caller(
                "use_liger_loss has no effect: every loss is computed in chunks, without the logits of the whole "
                "vocabulary. Leave it out.",
                FutureWarning,
            )
            self.use_liger_loss = None


@dataclass
class ReferencePolicy(OptionGroup):
    """The policy that the trained one is compared with."""

    ref_model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Keyword arguments for from_pretrained, as a dict or JSON object, used when the trainer loads "
            "ref_model from a name or path."
        },
    )
    precompute_ref_log_probs: bool = field(
        default=False,
        metadata={
            "help": "Score the whole dataset with the reference once, before the first step. The numbers are kept on disk "
            "and read again by the next run with the same model, data and settings; the reference then takes no memory."
        },
    )

    def check(self) -> None:
        super().check()
        self.ref_model_init_kwargs = json_object("ref_model_init_kwargs", self.ref_model_init_kwargs)


@dataclass
class ReferenceAdapters(OptionGroup):
    """References that are adapters of the policy's own base model."""

    model_adapter_name: str | None = field(
        default=None, metadata={"help": "Name of the adapter that is trained, in a model with several."}
    )
    ref_adapter_name: str | None = field(
        default=None,
        metadata={
            "help": "Name of the adapter that is the reference. None: the base model without any adapter."
        },
    )


@dataclass
class ReferenceSync(OptionGroup):
    """A reference that follows the policy (TR-DPO)."""

    sync_ref_model: bool = field(
        default=False,
        metadata={
            "help": "Let the reference follow the policy: every ref_model_sync_steps steps it becomes a mixture of both."
        },
    )
    ref_model_mixup_alpha: float = field(
        default=0.6,
        metadata={"help": "Share of the policy in that mixture, in [0, 1]; the rest is the old reference."},
    )
    ref_model_sync_steps: int = field(
        default=512, metadata={"help": "Optimiser steps between two updates of the reference."}
    )

    def check(self) -> None:
        super().check()
        if not 0 <= self.ref_model_mixup_alpha <= 1:
            raise ValueError(
                f"ref_model_mixup_alpha must be in [0, 1], got {self.ref_model_mixup_alpha}. It is the policy's share."
            )
        check_at_least("ref_model_sync_steps", self.ref_model_sync_steps, minimum=1)
