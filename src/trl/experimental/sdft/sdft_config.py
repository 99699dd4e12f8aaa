"""Configuration of self-distillation from prompts that show more."""

from dataclasses import dataclass
from typing import Literal

from trl.options.generation import Generation, VLLMMode
from trl.options.groups import OptionGroup, documented, option, same
from trl.options.shared import shared
from trl.trainer.grpo_config import RolloutTraining

DistillationMode = Literal["sampled_token", "full_logits", "topk_logits"]


@dataclass
class SelfDistillation(OptionGroup):
    """The divergence from a teacher that is made of the student."""

    learning_rate: float = same(RolloutTraining, "learning_rate", 5e-5)
    max_prompt_length: int | None = same(Generation, "max_prompt_length", 512)
    top_k: int | None = same(Generation, "top_k", 0)
    vllm_mode: VLLMMode = same(Generation, "vllm_mode", "colocate")
    disable_dropout: bool = shared("disable_dropout")
    teacher_model_kind: Literal["base", "live", "ema"] = option(
        "base", "The teacher's weights: before training ('base'), the student's ('live'), or their average ('ema')."
    )
    teacher_update_rate: float = option(
        0.05, "Share of the student in an update. 1 copies the student.", "(0, 1]", needs="teacher_model_kind=ema"
    )
    teacher_sync_steps: int = option(1, "Steps between two updates.", ">= 1", needs="teacher_model_kind=ema")
    distillation_alpha: float = option(
        0.5, "Divergence: 0 is the forward KL, 1 the reverse KL, between them generalised Jensen-Shannon.", "[0, 1]"
    )
    distillation_mode: DistillationMode = option(
        "topk_logits",
        "Tokens over which the divergence runs: all ('full_logits'), the student's most likely ones ('topk_logits'), "
        "or the sampled one ('sampled_token': an estimate of the reverse KL, with distillation_alpha=1).",
    )
    distillation_topk: int | None = option(100, "Number of tokens.", ">= 1", needs="distillation_mode=topk_logits")
    distillation_is_clip: float | None = option(
        2.0, "Largest importance weight of a token that an earlier student sampled. None: no such weights.", "(0, inf]"
    )
    distillation_add_tail: bool = option(
        False,
        "All other tokens are one more class. False: both distributions are renormalised.",
        needs="distillation_mode=topk_logits",
    )

    def check(self) -> None:
        super().check()
        if self.distillation_mode == "sampled_token" and self.distillation_alpha != 1:
            raise ValueError(
                f"distillation_mode='sampled_token' estimates the reverse KL, which is distillation_alpha=1, got "
                f"{self.distillation_alpha}. Set it to 1, or choose 'full_logits' or 'topk_logits'."
            )
        if self.distillation_mode == "topk_logits" and self.distillation_topk is None:
            raise ValueError("distillation_mode='topk_logits' needs distillation_topk, got None. Set it (100, say).")

    def check_template(self, name: str, *placeholders: str) -> None:
        """Raise ValueError unless the template has these placeholders."""
        template = getattr(self, name)
        if missing := [text for text in (f"{{{name}}}" for name in placeholders) if text not in template]:
            raise ValueError(f"{name}={template!r} must contain {' and '.join(missing)}. Add it.")


@documented
@dataclass
class SDFTConfig(SelfDistillation, RolloutTraining):
    """Settings of `SDFTTrainer`: those of `transformers.TrainingArguments` and the ones below.

    Example:
        >>> from trl.experimental.sdft import SDFTConfig
        >>> args = SDFTConfig("my-model", teacher_model_kind="ema", distillation_mode="full_logits", use_cpu=True)
        >>> args.num_generations, args.distillation_alpha
        (8, 0.5)
    """

    generate_from_teacher: bool = option(
        False, "The student completes the teacher's prompts instead of its own; it learns on its own."
    )
    teacher_prompt_template: str = option(
        "{prompt}\n\n{privileged_context}",
        "How a prompt and its privileged context make the teacher's prompt; in a conversation, the last message.",
    )
    num_loss_tokens_to_skip: int = option(0, "First tokens of a completion that are not trained.", ">= 0")

    def check(self) -> None:
        super().check()
        self.check_template("teacher_prompt_template", "prompt", "privileged_context")
