"""Configuration of generalised knowledge distillation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trl.options.groups import documented, option
from trl.options.shared import shared
from trl.trainer.sft_config import SFTConfig


@documented
@dataclass
class GKDConfig(SFTConfig):
    """Settings of `GKDTrainer`: those of `SFTConfig` and the ones below.

    Example:
        >>> from trl import GKDConfig
        >>> args = GKDConfig("my-model", lmbda=1.0, beta=1.0, use_cpu=True)
        >>> args.temperature, args.max_new_tokens
        (0.9, 128)
    """

    temperature: float = shared("temperature", 0.9)
    lmbda: float = option(0.5, "Share of the micro-batches whose completions the student generates itself.", "[0, 1]")
    beta: float = option(
        0.5,
        "Divergence from the teacher: 0 is the forward KL (covers the teacher), 1 the reverse KL (picks what it finds "
        "likely), between them the generalised Jensen-Shannon divergence.",
        "[0, 1]",
    )
    max_new_tokens: int = option(128, "Longest completion that student or teacher generate, in tokens.", ">= 1")
    teacher_model_name_or_path: str | None = shared("teacher_model_name_or_path")
    teacher_model_init_kwargs: dict[str, Any] | str | None = shared("teacher_model_init_kwargs")
    teacher_model_server_url: Mapping[str, str] | str | None = shared("teacher_model_server_url")
    teacher_top_k: int = shared("teacher_top_k")
    teacher_server_timeout: float = shared("teacher_server_timeout")
    disable_dropout: bool = shared("disable_dropout")
    seq_kd: bool = option(
        False, "Sequence-level distillation: the teacher generates the completions that the student does not."
    )

    def check(self) -> None:
        super().check()
        if self.packing and (self.lmbda or self.seq_kd):
            raise ValueError(
                f"packing=True with lmbda={self.lmbda} and seq_kd={self.seq_kd}: generated completions are not packed. "
                "Leave packing out (rows are never padded), or set lmbda=0."
            )
        for name, neutral in (("loss_type", "nll"), ("label_smoothing_factor", 0.0)):
            if getattr(self, name) != neutral:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is another loss than the divergence of GKD. Leave it out."
                )
