"""SDPO: the teacher is the student, shown a successful completion of the same prompt, or feedback."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from torch import Tensor

from trl.experimental.sdft.sdft_trainer import CONTEXT, SelfDistillationTrainer
from trl.experimental.sdpo.sdpo_config import SDPOConfig
from trl.methods.grpo import GRPOMethod
from trl.methods.method import Batch, Outcome, Scoring, Step
from trl.methods.online import Corrected
from trl.methods.self_distillation import SelfDistillationMethod
from trl.models.packed.layout import ROLLOUT
from trl.models.scoring.causal import Scored
from trl.objectives.group_advantages import group_moments
from trl.reporting.model_card import Paper
from trl.rewards.result import RewardInputs, Text, scores_by_source
from trl.rollouts.experience import ADVANTAGE, FILTERED, SCORES, Experience
from trl.rollouts.measures import measured_groups
from trl.rollouts.teacher_prompts import extended, filled
from trl.tensors.reduce import Unit, Weighted, reduce_terms, weighted
from trl.tensors.vocabulary_loss import VocabularyLoss

logger = logging.getLogger(__name__)

# Columns per completion, bool:
REPROMPTED = "reprompted"  # its teacher is shown more than its prompt
SOLVED = "shown_solution"  # a successful completion
HAS_FEEDBACK = "has_feedback"
SHOWN_FEEDBACK = "shown_feedback"
PREFIX = "self_distillation/"
_THINKING = re.compile(r"(^|<think>)((?!<think>).)*?</think>\s*", re.DOTALL)


class SDPOMethod(SelfDistillationMethod):
    """The divergence from a teacher that is shown more, and the loss of GRPO for `distillation_weight` below 1."""

    args: SDPOConfig

    def __init__(self, args: SDPOConfig) -> None:
        super().__init__(args)
        self.policy, self.reward_scale = GRPOMethod(args), args.reward_scale
        self.has_policy_loss = args.distillation_weight < 1
        if self.has_policy_loss:
            self.units: tuple[Unit, ...] = ("token", "group")  # of the divergence, of GRPO  # type: ignore[misc]

    def distilled(self, experience: Experience) -> Tensor:
        rows = experience.per_row[REPROMPTED].bool()
        return super().distilled(experience) & rows[experience.completions.row_index]

    def token_weights(self, experience: Experience) -> Tensor:
        return self.args.distillation_weight * super().token_weights(experience)

    def count(self, batch: Batch) -> Tensor:
        counts = super().count(batch)
        return torch.cat([counts, self.policy.count(batch)]) if self.has_policy_loss else counts

    def score(self, batch: Batch, scoring: Scoring) -> tuple[VocabularyLoss, Scored | None]:  # type: ignore[override]
        """The divergence, and the log-probs of GRPO's loss."""
        divergence = super().score(batch, scoring)
        return divergence, scoring.logps(self.learned(batch)) if self.has_policy_loss else None

    def terms(self, batch: Batch, scored: tuple[VocabularyLoss, Scored | None], step: Step) -> Outcome:
        """The divergence, and the loss of GRPO beside it."""
        outcome, experience = super().terms(batch, scored[0], step), batch[ROLLOUT]
        if scored[1] is None:
            return outcome
        (terms,) = self.policy.objective(experience, scored[1], step)
        loss = Weighted(reduce_terms(terms, 1.0).detach(), self.policy.divisor(experience))
        values, metrics = (1 - self.args.distillation_weight) * terms.values, {f"{PREFIX}policy_loss": loss}
        terms = terms._replace(values=values, per="group", metrics={**terms.metrics, **metrics})
        return outcome._replace(terms=[*outcome.terms, terms])

    def needs_old(self, experience: Experience) -> bool:
        return self.has_policy_loss and self.policy.needs_old(experience)

    def corrected(self, experience: Experience, *, is_exact: bool, counted: Tensor) -> Corrected | None:
        if not self.has_policy_loss:
            return None
        return self.policy.corrected(experience, is_exact=is_exact, counted=counted)

    def rewards_and_advantages(self, rows: Mapping[str, Tensor], group_size: int) -> tuple[Tensor, Tensor]:
        return self.policy.rewards_and_advantages(rows, group_size)

    def signals(self, experience: Experience) -> Tensor:
        advantages = experience.per_row[ADVANTAGE][experience.completions.row_index]
        return advantages.abs() + self.distilled(experience)

    def metrics(self, rows: Mapping[str, Tensor], sources: Sequence[str], group_size: int) -> dict[str, Weighted]:
        args, scores = self.args, rows[SCORES]
        scored, std = scores[~scores.isnan()], group_moments(scores, group_size).std
        successful = (scores >= args.success_reward_threshold).view(-1, group_size).any(dim=1)
        columns = {
            "reward_mean": scored,
            "reward_std": scored.std().view(1) if len(scored) > 1 else scored[:0],
            "reward_min": scored.amin().view(1) if len(scored) else scored,
            "reward_max": scored.amax().view(1) if len(scored) else scored,
            "group_reward_std_mean": std,
            "flat_group_fraction": std <= args.diagnostics_flat_tolerance,
            "success_group_fraction": successful,
            "success_sample_fraction": rows[SOLVED],
            "feedback_available_fraction": rows[HAS_FEEDBACK],
            "feedback_used_fraction": rows[SHOWN_FEEDBACK],
            "reprompt_sample_fraction": rows[REPROMPTED],
        }
        means = {name: weighted(column) for name, column in columns.items()}
        of_sources = scores_by_source(rows, sources).items()
        means |= {f"rewards/{name}": weighted(column, ~column.isnan()) for name, column in of_sources}
        metrics = measured_groups(rows, sources, group_size, scale=self.reward_scale)
        return metrics | {PREFIX + name: mean for name, mean in means.items()}


class SDPOTrainer(SelfDistillationTrainer):
    """Trainer of self-distillation policy optimisation (arXiv:2601.20802).

    Takes rewards and stored rows with a `prompt`, text or messages, as `GRPOTrainer` does; no streams, tokenised rows,
    images, tools, agent or rollout_func. The student completes prompts. The teacher is the student as
    `teacher_model_kind` says, shown the first successful completion of the same prompt, and with
    `include_environment_feedback` the text in the row's column `privileged_context`; the student learns its
    distributions at the tokens of the completion. Completions whose teacher would be shown neither are not distilled.

    Example:
        >>> trainer = SDPOTrainer("Qwen/Qwen3-0.6B", is_right, SDPOConfig("student"), dataset)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "sdpo"]
    _name: ClassVar[str] = "SDPO"
    _paper = Paper("Reinforcement Learning via Self-Distillation", "2601.20802")
    args: SDPOConfig
    method: SDPOMethod
    method_type = SDPOMethod
    config_type = SDPOConfig

    def check_rows(self, dataset: Any, name: str, args: Any, columns: Sequence[str] = ()) -> None:
        """Each row has a prompt, and a column of feedback if it is to be shown."""
        shows_feedback = getattr(args, "include_environment_feedback", False)
        super().check_rows(dataset, name, args, ["prompt", CONTEXT] if shows_feedback else ["prompt"])
        for row, text in enumerate(dataset[CONTEXT] if shows_feedback else ()):
            if not (text is None or isinstance(text, str)):
                raise ValueError(
                    f"{name} dataset, row {row}: {CONTEXT} is {text!r}, expected feedback as text, or None for no "
                    "feedback."
                )

    def begin_rollouts(self, *args: Any, **kwargs: Any) -> None:
        """Rewards also choose the teacher's prompts."""
        super().begin_rollouts(*args, **kwargs)
        self.rollouts.apply_rewards, self._degenerate = self.reprompted, dict[str, int]()

    def reprompted(self, experience: Experience, scores: Tensor, inputs: RewardInputs, *, training: bool) -> Experience:
        """Completions with their scores, and the prompts that their teacher is shown."""
        args, count = self.args, len(inputs)
        completed = self.method.apply_rewards(experience, scores, inputs, training=training)
        texts = [
            completion if isinstance(completion, str) else completion[-1]["content"]
            for completion in inputs.completions
        ]
        is_right = (scores >= args.success_reward_threshold).tolist()
        answers = [text if right else None for text, right in zip(texts, is_right, strict=True)]
        answers = gather_object(answers)  # those of one group may be in several processes
        group_size = self.sizes.group if training else self.evaluation_group
        solutions = solutions_of(answers, group_size, without_own=args.dont_reprompt_on_self_success)
        first = args.process_index * count
        solutions = solutions[first : first + count] if args.use_successful_as_teacher else [None] * count
        texts_of_rows = inputs.columns[CONTEXT] if args.include_environment_feedback else [None] * count
        feedback = [(text or "").strip() or None for text in texts_of_rows]
        shown = [
            None if args.environment_feedback_only_without_solution and solution is not None else text
            for solution, text in zip(solutions, feedback, strict=True)
        ]
        contexts = zip(inputs.prompts, solutions, shown, strict=True)
        tokens = self.teacher_prompts.tokens(inputs.columns, [teacher_prompt(args, *context) for context in contexts])
        columns = {SOLVED: solutions, HAS_FEEDBACK: feedback, SHOWN_FEEDBACK: shown}
        flags = {name: torch.tensor([x is not None for x in column]) for name, column in columns.items()}
        flags[REPROMPTED] = flags[SOLVED] | flags[SHOWN_FEEDBACK]
        if not self.method.has_policy_loss:
            flags[FILTERED] = ~flags[REPROMPTED]  # for the counts of tokens
        return self.teacher_prompts.with_prompts(completed.with_rows(**flags), tokens)

    def rollout_metrics(self, experience: Experience, *, share: float) -> dict[str, Weighted]:
        """With a warning where nothing has been learned from several rollout batches in a row."""
        metrics, every = (super().rollout_metrics(experience, share=share), self.args.diagnostics_warning_interval)
        for name, what, worst in (
            ("flat_group_fraction", "the rewards of every group are equal", 1),
            ("success_group_fraction", "no completion is successful (see success_reward_threshold)", 0),
            ("reprompt_sample_fraction", "no teacher was shown more than the prompt", 0),
        ):
            count = self._degenerate.get(name, 0) + 1 if metrics[PREFIX + name].mean == worst else 0
            self._degenerate[name] = count
            if every and count and count % every == 0:
                logger.warning("In the last %d rollout batches %s.", count, what)
        return metrics


def teacher_prompt(args: SDPOConfig, prompt: Text, solution: str | None, feedback: str | None) -> Text:
    """A prompt with a successful completion and with feedback; the prompt itself without both."""
    if solution is None and feedback is None:
        return prompt
    parts = {"solution": "", "feedback": ""}
    if solution is not None:
        answer = _THINKING.sub("", solution) if args.remove_thinking_from_demonstration else solution
        parts["solution"] = filled(args.solution_template, successful_previous_attempt=answer.strip())
    if feedback is not None:
        parts["feedback"] = filled(args.feedback_template, feedback_raw=feedback)
    return extended(args.reprompt_template, prompt, **parts)


def solutions_of(answers: Sequence[str | None], group_size: int, *, without_own: bool) -> list[str | None]:
    """For each completion the first answer of its group, None where there is none; `without_own`: of the others.

    >>> solutions_of([None, "a", "b", None], 2, without_own=True)
    ['a', None, None, 'b']
    """
    solutions = []
    for row in range(len(answers)):
        start = row - row % group_size
        others = [n for n in range(start, start + group_size) if not (without_own and n == row)]
        solutions.append(next((answers[n] for n in others if answers[n] is not None), None))
    return solutions
