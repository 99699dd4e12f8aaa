"""Option groups of rollouts: how completions are drawn, and how many rows are scored at once."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from trl.options.checks import check_at_least, check_one_of
from trl.options.groups import OptionGroup

StopToken = Literal["eos"]


@dataclass
class GatheredGeneration(OptionGroup):
    """Generation under ZeRO-3."""

    ds3_gather_for_generation: bool = field(
        default=True,
        metadata={
            "help": "Under DeepSpeed ZeRO-3, gather the policy's weights once for a whole rollout: faster, and needs room for "
            "them on each device. False: layer by layer, for models that do not fit on one device. vLLM is sent them layer by layer "
            "in any case."
        },
    )


@dataclass
class FixedResponses(OptionGroup):
    """Responses up to a fixed length."""

    response_length: int = field(
        default=53, metadata={"help": "Longest response, in tokens, with the token that stops it."}
    )
    stop_token: StopToken | None = field(
        default=None,
        metadata={
            "help": "'eos': responses end with the tokenizer's end-of-sequence token. None: with stop_token_id, or, without "
            "one, at response_length."
        },
    )
    stop_token_id: int | None = field(
        default=None,
        metadata={
            "help": "Id of the token that ends a response. None: as stop_token says. Give one of the two."
        },
    )
    temperature: float = field(
        default=0.7,
        metadata={
            "help": "Divides the logits, in sampling and wherever log-probabilities are computed; > 0."
        },
    )
    missing_eos_penalty: float | None = field(
        default=None,
        metadata={
            "help": "Subtracted from the score of a response that did not end with its end token. None: nothing is."
        },
    )
    local_rollout_forward_batch_size: int = field(
        default=64,
        metadata={"help": "Rows of a process that are scored at once, without gradient, after a rollout."},
    )

    def check(self) -> None:
        super().check()
        for name in ("response_length", "local_rollout_forward_batch_size"):
            check_at_least(name, getattr(self, name), minimum=1, optional=False)
        check_one_of("stop_token", self.stop_token, get_args(StopToken), optional=True)
        if self.stop_token is not None and self.stop_token_id is not None:
            raise ValueError(
                f"stop_token={self.stop_token!r} and stop_token_id={self.stop_token_id} are two settings of one thing, one is "
                "allowed. Leave one out."
            )
        if not self.temperature > 0:
            raise ValueError(
                f"temperature must be > 0, got {self.temperature}. A policy that is trained must sample; use a small one "
                "for nearly greedy responses."
            )
