"""Configuration of on-policy distillation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trl.options.generation import Generation, VLLMMode
from trl.options.groups import documented, moved, option, same
from trl.options.shared import shared
from trl.trainer.gkd_config import GKDConfig
from trl.trainer.grpo_config import RolloutTraining


@documented
@dataclass
class DistillationConfig(RolloutTraining):
    """Settings of `DistillationTrainer`: those of `transformers.TrainingArguments` and the ones below.

    In each optimiser step the student completes `per_device_train_batch_size * processes * gradient_accumulation_steps
    / num_generations` prompts.

    Example:
        >>> from trl import DistillationConfig
        >>> args = DistillationConfig("my-model", beta=0.5, use_cpu=True)
        >>> args.num_generations, args.max_completion_length
        (1, 512)
    """

    num_generations: int | None = same(RolloutTraining, "num_generations", 1)
    max_completion_length: int | None = same(Generation, "max_completion_length", 512)
    top_k: int | None = same(Generation, "top_k", 0)
    vllm_mode: VLLMMode = same(Generation, "vllm_mode", "colocate")
    temperature: float = shared("temperature", help="Of sampling, and of both distributions in the loss.")
    beta: float = same(GKDConfig, "beta", 1.0)
    teacher_model_name_or_path: str | None = shared("teacher_model_name_or_path")
    teacher_model_revision: str | None = option(None, "Branch, tag or commit of a teacher on the Hub.")
    teacher_model_init_kwargs: dict[str, Any] | str | None = shared("teacher_model_init_kwargs")
    teacher_model_server_url: Mapping[str, str] | str | None = shared("teacher_model_server_url")
    teacher_top_k: int = shared("teacher_top_k")
    teacher_server_timeout: float = shared("teacher_server_timeout")
    vllm_structured_outputs_regex: str | None = moved(to="vllm_guided_decoding_regex")
    pad_to_multiple_of: int | str | None = moved("rows are never padded.")

    def check(self) -> None:
        super().check()
        if self.teacher_model_revision is not None:
            kwargs: Any = self.teacher_model_init_kwargs or {}
            self.teacher_model_init_kwargs = {**kwargs, "revision": self.teacher_model_revision}
