"""Configuration of GOLD, distillation across tokenizers."""

from dataclasses import dataclass

from transformers import TrainingArguments

from trl.options.generation import Completions
from trl.options.groups import documented, moved, option, same
from trl.trainer.gkd_config import GKDConfig

_TRACKER = "trackers read their own environment variables, such as WANDB_PROJECT."
_HUB = "the commands of the Hub's own library do this."


@documented
@dataclass
class GOLDConfig(Completions, GKDConfig):
    """Settings of `GOLDTrainer`: those of `GKDConfig` and the ones below.

    Example:
        >>> from trl.experimental.gold import GOLDConfig
        >>> args = GOLDConfig("my-model", use_uld_loss=True, uld_use_hybrid_loss=True, use_cpu=True)
        >>> args.temperature, args.top_p, args.max_completion_length
        (0.9, 0.95, 128)
    """

    max_prompt_length = None  # what vLLM's server is checked for; prompts are cut by max_length

    learning_rate: float = same(TrainingArguments, "learning_rate", 1e-7)
    temperature: float = same(GKDConfig, "temperature")
    top_p: float = same(Completions, "top_p", 0.95)
    top_k: int | None = same(Completions, "top_k", 0)
    max_completion_length: int = same(
        GKDConfig,
        "max_new_tokens",
        help="Longest completion that student or teacher generate, in tokens; less than max_length.",
    )
    max_new_tokens: int | None = moved(to="max_completion_length")
    student_model_revision: str = option("main", "Revision of the student, if it is loaded by name.")
    teacher_tokenizer_name_or_path: str | None = option(
        None, "Tokenizer of the teacher, for use_uld_loss. None: the one saved with the teacher."
    )
    use_uld_loss: bool = option(False, "The teacher has another tokenizer: compare spans of tokens of the same bytes.")
    use_extended_uld: bool = option(True, "Compare spans of tokens of the same bytes. False: tokens of equal number.")
    uld_use_hybrid_loss: bool = option(
        False,
        "On the tokens that both vocabularies have, the divergence of beta; sorted probabilities are compared on the "
        "others only.",
        needs="use_uld_loss",
    )
    uld_hybrid_matched_weight: float | None = option(
        None, "Weight of that divergence. None: the share of the teacher's tokens that the student has."
    )
    uld_hybrid_unmatched_weight: float | None = option(
        None, "Weight of the other tokens. None: 1 less that share. Set both weights or none."
    )
    uld_crossentropy_weight: float = option(0.0, "Weight of the cross-entropy of the completions' tokens.")
    uld_distillation_weight: float = option(1.0, "Weight of the distance from the teacher.")
    uld_student_temperature: float = option(1.0, "Divides the student's logits in use_uld_loss.", "> 0")
    uld_teacher_temperature: float = option(1.0, "Divides the teacher's logits in use_uld_loss.", "> 0")
    uld_skip_student_eos: bool = option(
        True, "Leave the end token out of the comparison. It is compared if neither side leaves it out."
    )
    uld_skip_teacher_eos: bool = option(True, "The same on the teacher's side.")
    steps_per_generation: int | None = moved("the completions of an optimiser step are generated at once.")
    vllm_server_port: int = same(Completions, "vllm_server_port", 8001)
    vllm_gpu_memory_utilization: float = same(Completions, "vllm_gpu_memory_utilization", 0.9)
    vllm_sync_frequency: int = moved("vLLM has the weights of each step.", default=1)
    log_completions: bool = option(False, "Print some of the student's completions.")
    log_completions_steps: int = option(100, "Optimiser steps between two tables.", ">= 1", needs="log_completions")
    num_completions_to_print: int | None = same(Completions, "num_completions_to_print", 5)
    wandb_entity: str | None = moved(_TRACKER)
    wandb_project: str | None = moved(_TRACKER)
    wandb_run_group: str | None = moved(_TRACKER)
    wandb_log_unique_prompts: bool = moved("completions are printed only.", default=True)
    callbacks: list[str] = option([], "No effect: pass callbacks to the trainer.")
    hub_model_revision: str | None = moved(_HUB, default="main")
    overwrite_hub_revision: bool = moved(_HUB, default=False)
    push_to_hub_revision: bool = moved(_HUB, default=False)
    trl_project: str = moved(_TRACKER, default="smollm3")

    def check(self) -> None:
        super().check()
        if self.max_length is not None and self.max_completion_length >= self.max_length:
            raise ValueError(
                f"max_completion_length={self.max_completion_length} must be below max_length={self.max_length}, "
                "which leaves no room for a prompt. Lower it, or raise max_length."
            )
        weights = self.uld_hybrid_matched_weight, self.uld_hybrid_unmatched_weight
        if (weights[0] is None) != (weights[1] is None):
            raise ValueError(
                f"uld_hybrid_matched_weight={weights[0]} and uld_hybrid_unmatched_weight={weights[1]} must be set "
                "together. Set both, or none."
            )
        if not self.use_uld_loss:
            return
        if not (self.uld_crossentropy_weight or self.uld_distillation_weight):
            raise ValueError("uld_crossentropy_weight and uld_distillation_weight are both 0. Raise one of them.")
        unsupported = [name for name in ("packing", "assistant_only_loss", "dataset_kwargs") if getattr(self, name)]
        if unsupported:
            raise ValueError(
                f"use_uld_loss=True does not support {', '.join(unsupported)}, because each row is aligned with the "
                "teacher's. Leave it out."
            )
