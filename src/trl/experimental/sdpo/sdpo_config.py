"""Configuration of self-distillation by rewards."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from trl.experimental.sdft.sdft_config import DistillationMode, SelfDistillation
from trl.options.checks import warn_unread
from trl.options.groups import documented, option, same
from trl.trainer.grpo_config import GRPOConfig

_OF_POLICY = {
    "epsilon", "epsilon_high", "delta", "loss_type", "importance_sampling_level", "scale_rewards",
    "advantage_estimator",
    "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_cap",
}  # fmt: skip
_OF_SUCCESSES = {
    "dont_reprompt_on_self_success", "environment_feedback_only_without_solution", "remove_thinking_from_demonstration",
    "solution_template",
}  # fmt: skip
_OF_GRPO = (
    "beta", "dynamic_sampling", "teacher_kl_coef", "teacher_model_name_or_path", "teacher_model_init_kwargs",
    "top_entropy_quantile",
)  # fmt: skip


@documented
@dataclass
class SDPOConfig(SelfDistillation, GRPOConfig):
    """Settings of `SDPOTrainer`: those of `GRPOConfig` and the ones below.

    Example:
        >>> from trl.experimental.sdpo import SDPOConfig
        >>> args = SDPOConfig("my-model", include_environment_feedback=True, use_cpu=True)
        >>> args.teacher_model_kind, args.distillation_mode, args.distillation_weight
        ('ema', 'sampled_token', 1.0)
    """

    least_generations: ClassVar[int] = 1
    teacher_model_kind: Literal["base", "live", "ema"] = same(SelfDistillation, "teacher_model_kind", "ema")
    distillation_alpha: float = same(SelfDistillation, "distillation_alpha", 1.0)
    distillation_mode: DistillationMode = same(SelfDistillation, "distillation_mode", "sampled_token")
    distillation_topk: int | None = same(SelfDistillation, "distillation_topk", None)
    distillation_weight: float = option(
        1.0,
        "Share of the distillation in the loss; the rest is the policy loss of GRPO, which costs a second forward and "
        "backward pass. 1: rewards only choose what the teacher is shown.",
        "(0, 1]",
    )
    use_successful_as_teacher: bool = option(True, "Show the teacher the first successful completion of the prompt.")
    success_reward_threshold: float = option(1.0, "Reward from which a completion is successful.", "[-inf, inf]")
    dont_reprompt_on_self_success: bool = option(
        True, "A successful completion is not shown to its own teacher, only those of others."
    )
    include_environment_feedback: bool = option(
        False, "Show the teacher the feedback of a row, its text in the column privileged_context."
    )
    environment_feedback_only_without_solution: bool = option(
        False, "Only where no completion of the prompt is successful.", needs="include_environment_feedback"
    )
    remove_thinking_from_demonstration: bool = option(False, "Remove the <think> blocks of a completion that is shown.")
    max_reprompt_len: int = option(10240, "Longest prompt of the teacher, in tokens; the beginning is cut off.", ">= 1")
    reprompt_template: str = option(
        "{prompt}{solution}{feedback}\n\nAnswer the question above.",
        "The teacher's prompt (in a conversation its last message), with {prompt}, {solution} and {feedback}.",
    )
    solution_template: str = option(
        "\n\nA correct answer:\n\n{successful_previous_attempt}",
        "The part of the successful completion, {successful_previous_attempt}. Empty where there is none.",
    )
    feedback_template: str = option(
        "\n\nFeedback on an earlier answer:\n\n{feedback_raw}",
        "The part of the feedback, {feedback_raw}. Empty where there is none.",
        needs="include_environment_feedback",
    )
    diagnostics_warning_interval: int = option(
        10,
        "Rollout batches in a row with equal rewards, or without a success or a teacher's prompt, from one warning to "
        "the next. 0: none.",
    )
    diagnostics_flat_tolerance: float = option(1e-8, "Largest deviation of a group's rewards that counts as equal.")

    def check(self) -> None:
        super().check()
        self.check_template("reprompt_template", "prompt", "solution", "feedback")
        self.check_template("solution_template", "successful_previous_attempt")
        self.check_template("feedback_template", "feedback_raw")
        fields = type(self).__dataclass_fields__
        if changed := [name for name in _OF_GRPO if getattr(self, name) != fields[name].default]:
            raise ValueError(f"SDPO does not have {changed[0]}={getattr(self, changed[0])!r}. Leave it out.")
        if not (self.use_successful_as_teacher or self.include_environment_feedback):
            raise ValueError(
                "use_successful_as_teacher=False and include_environment_feedback=False show the teacher nothing. Set "
                "one of them."
            )
        if not self.use_successful_as_teacher:
            warn_unread(self, _OF_SUCCESSES, "with use_successful_as_teacher=False. Leave it out")
        if self.num_generations == 1 and (
            self.distillation_weight < 1
            or (self.dont_reprompt_on_self_success and not self.include_environment_feedback)
        ):
            raise ValueError(
                "num_generations=1 has no other completion of the prompt to learn from or to compare with. Set it to "
                "2 or more, or include_environment_feedback=True or dont_reprompt_on_self_success=False, with "
                "distillation_weight=1."
            )
        if self.distillation_weight == 1:
            warn_unread(self, _OF_POLICY, "with distillation_weight=1. Leave it out, or lower distillation_weight")
