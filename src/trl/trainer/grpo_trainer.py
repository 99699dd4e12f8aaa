"""Group relative policy optimisation: advantages are relative to the other completions of the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trl._lazy import attach
from trl.models.scoring.causal import Scored
from trl.models.scoring.head import LossOf, ScoreOptions
from trl.models.switches import undisturbed
from trl.objectives.distillation import reverse_kl_advantages
from trl.objectives.group_advantages import estimated
from trl.objectives.group_policy import (
    LOSS_TYPES,
    divisor_share,
    entropy_threshold,
    group_policy_loss,
    soft_gate,
    token_losses,
)
from trl.objectives.sampler_correction import correction, correction_extremes, correction_metrics
from trl.reporting.model_card import Paper
from trl.rollouts.experience import (
    ADVANTAGE,
    CHOSEN,
    CORRECTION,
    MEAN_LENGTH,
    OLD,
    SAMPLING_KEPT,
    SAMPLING_LOGPS,
    SCORES,
    STUDENT,
    TEACHER,
    TRAINED,
    Experience,
    concatenate,
)
from trl.rollouts.token_counts import token_advantages
from trl.tensors.reduce import LossTerms, Weighted, weighted, where_counted
from trl.trainer.grpo_config import GroupTraining, GRPOConfig
from trl.trainer.online_method import Corrected, GroupMethod, StepContext
from trl.trainer.online_trainer import OnlineTrainer
from trl.trainer.online_trainer import RolloutFunc as RolloutFunc

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere


class GRPOMethod(GroupMethod):
    """Advantages relative to the group, the loss of `loss_type`, and the correction of the sampler's mismatch."""

    args: GRPOConfig

    def __init__(self, args: GRPOConfig) -> None:
        super().__init__(args)
        self.reward_scale = args.reward_scale
        self.needs_teacher = self.scores_teacher = args.teacher_kl_coef != 0

    @property
    def has_sequence_weights(self) -> bool:
        """Whether the loss type weighs each token by the ratio of its sequence (VESPO)."""
        return LOSS_TYPES[self.settings.loss_type].ratios is not None

    def rewards_and_advantages(self, rows: Mapping[str, Tensor], group_size: int) -> tuple[Tensor, Tensor]:
        return rows[SCORES], estimated(self.args.estimator, rows[SCORES], group_size)

    def with_teacher(self, experience: Experience) -> Experience:
        """With an advantage of each token, to which the teacher's and the policy's log-probs add."""
        if not self.scores_teacher:
            return experience
        gaps = from_teacher(experience)
        advantages = token_advantages(experience) + self.teacher_advantages(experience, gaps)
        return experience.with_tokens(**{ADVANTAGE: advantages})

    def teacher_advantages(self, experience: Experience, gaps: Tensor) -> Tensor:
        """Of `gaps (K,)`, log q - log p, which are 0 where nothing is trained."""
        return self.args.teacher_kl_coef * gaps

    def token_metrics(self, experience: Experience) -> dict[str, Weighted]:
        """With a teacher, `teacher_kl`: the estimate of the policy's divergence from it, in nats per token."""
        if not self.scores_teacher:
            return {}
        return {"teacher_kl": weighted(-from_teacher(experience), experience.per_token[TRAINED])}

    def needs_old(self, experience: Experience) -> bool:
        return self.scores_teacher or self._corrects(experience)

    def _corrects(self, experience: Experience) -> bool:
        return self.args.vllm_importance_sampling_correction and SAMPLING_LOGPS in experience.per_token

    def corrected(self, experience: Experience, *, is_exact: bool, counted: Tensor) -> Corrected | None:
        """With importance weights, or, for a loss with weights of sequences, with the sampler's log-probs as the old
        ones.
        """
        if is_exact or not self._corrects(experience) or OLD not in experience.per_token:
            return None
        row, old = experience.completions.row_index, experience.per_token[OLD]
        mask = experience.per_token[TRAINED] & counted[row]
        sampling = experience.per_token[SAMPLING_LOGPS] + experience.per_token.get(SAMPLING_KEPT, 0.0)
        sampling = sampling.to(old.dtype)
        mode: Any = self.args.vllm_importance_sampling_mode
        cap = self.args.vllm_importance_sampling_cap
        found = correction(old, sampling, mask, row, len(experience), mode=mode, cap=cap)
        columns = {OLD: sampling} if self.has_sequence_weights else {CORRECTION: found.factors}
        measured = correction_metrics(found, mask), correction_extremes(found, mask)
        return Corrected(experience.with_tokens(**columns), *measured)

    def old_logps(self, experience: Experience, context: StepContext) -> Tensor | None:
        if self.has_sequence_weights and not context.is_exact and self._corrects(experience):
            return experience.per_token[OLD]  # the sampler's
        return super().old_logps(experience, context)

    def objective(self, experience: Experience, scored: Scored, context: StepContext) -> list[LossTerms]:
        tokens = self.tokens(experience, context)
        return [group_policy_loss(scored.logps, tokens, self.settings, entropies=scored.entropies)]

    def token_losses(self, experience: Experience, context: StepContext) -> LossOf | None:
        return token_losses(self.tokens(experience, context), self.settings)

    def divisor(self, experience: Experience) -> Tensor:
        return divisor_share(
            self.settings.loss_type,
            experience.per_token[TRAINED],
            len(experience),
            rollout_tokens=experience.per_row[MEAN_LENGTH][0],
            longest=self.args.max_completion_length or 0,
        )


def from_teacher(experience: Experience) -> Tensor:
    """How much more likely the teacher finds each sampled token, `log q - log p`, `(K,)`; 0 where nothing is
    trained.
    """
    columns = experience.per_token
    gaps = reverse_kl_advantages(columns.get(STUDENT, columns[OLD]), columns[TEACHER])
    return where_counted(gaps, columns[TRAINED])


class GRPOTrainer(OnlineTrainer):
    """Trainer of group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300) and what came of it.

    Args:
        model: the policy: a causal language model, a `PeftModel`, or a name or path.
        reward_funcs: functions `func(prompts=, completions=, completion_ids=, trainer_state=, **columns)`, async ones
        too,
            sequence classifiers with one label or their paths, or several of them, whose weighted sum is the reward.
        args: a `GRPOConfig`.
        train_dataset: rows with a `prompt` (text or messages) or tokenised, with `input_ids`; other columns are handed
        to
            reward functions. A stream needs `max_steps`.
        eval_dataset: the same kind of rows, or a dict of several sets by name.
        processing_class: the policy's tokenizer, or its processor where prompts have images; by default the one saved
        with it. reward_processing_classes: the tokenizer of each reward model (None for functions). callbacks: further
        callbacks. optimizers: an optimizer and a scheduler, instead of those that the config describes. peft_config:
        trains a new adapter of the policy with these settings. tools: functions, sync or async, with type hints and
        docstrings, that the policy may call in its completions. rollout_func: `func(prompts, trainer)` that generates
        instead of the policy: a dict with `prompt_ids`,
            `completion_ids`, perhaps `logprobs`, and further fields for the reward functions.
        teacher_model: a model of the same tokenizer, or its name or path, for `teacher_kl_coef`; None with an adapter:
        its base. agent: `async def agent(row, base_url, api_key)` that talks to the policy over OpenAI's API and
        returns its reward, or a
            command (docs/guides/agents.md). `reward_funcs` may be None then.
        environment_factory: makes objects with `reset(**row)`, whose other public methods are tools, and which may have
        a
            `get_reward`; or a dict of several, among which the column `environment` chooses (docs/guides/agents.md).
            `train_dataset` may be None then.

    Example:
        >>> def brevity(completions, **columns):
        ...     return [-float(len(text)) for text in completions]
        >>> trainer = GRPOTrainer(
        ...     "Qwen/Qwen3-0.6B", brevity, GRPOConfig("brief"), dataset
        ... )  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "grpo"]
    evaluation_metrics: ClassVar[tuple[str, ...]] = ("loss", "reward", "reward_std")
    _name: ClassVar[str] = "GRPO"
    _paper = Paper("DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", "2402.03300")
    args: GRPOConfig
    method_type: ClassVar[type[GroupMethod]] = GRPOMethod
    config_type: ClassVar[type[GroupTraining]] = GRPOConfig

    # ---- the tokens with the highest entropies

    def prepare_step(self, batches: list[Any]) -> None:
        """With `top_entropy_quantile`, choose the tokens of the whole optimiser step, over all processes."""
        super().prepare_step(batches)
        if self.args.top_entropy_quantile >= 1:
            return
        options, entropies = ScoreOptions(entropy="scored", temperature=self.sampling.temperature), []
        with torch.no_grad(), undisturbed(self.model_wrapped):  # type: ignore[arg-type]
            for batch in batches:
                inputs: Any = self._prepare_inputs({**batch})
                count = len(inputs.pop("experience").completions.values)
                found = self.score(self.model_wrapped, inputs, options).entropies  # type: ignore[arg-type]
                assert found is not None
                entropies.append(found[:count].cpu())
        masks = [batch["experience"].per_token[TRAINED] for batch in batches]
        every = torch.cat(entropies), torch.cat(masks)
        chosen = self.get_high_entropy_mask(*every, 1 - self.args.top_entropy_quantile)
        parts = chosen.split([len(own) for own in entropies])
        is_first_pass = self.state.global_step % self.sizes.steps < self.sizes.mini_batches
        if is_first_pass and self._token_counts is not None:
            rows = concatenate([batch["experience"] for batch in batches])
            self._token_counts.mask(rows, chosen, self.accelerator)
        for batch, own in zip(batches, parts, strict=True):
            batch["experience"] = batch["experience"].with_tokens(**{CHOSEN: own})

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """Tokens with an entropy of at least the `threshold` quantile of those in the mask, bool of any shape.

        The quantile is over the tokens of all processes, which must all call it.
        """
        values, inside = entropies.flatten(), mask.flatten()
        if self.accelerator.num_processes > 1:
            table = torch.stack([values, inside.to(values.dtype)], dim=1).to(self.accelerator.device)
            table: Any = self.accelerator.gather(self.accelerator.pad_across_processes(table))
            values, inside = table.cpu().unbind(dim=1)
        least = entropy_threshold(values, inside, 1 - threshold)
        return (entropies >= least.to(entropies.device)) & mask.bool()

    def compute_liger_loss(self, unwrapped_model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The loss of a micro-batch, as `compute_loss` gives it: no loss here holds the logits of a whole batch."""
        return self.compute_loss(unwrapped_model, inputs)

    @staticmethod
    def get_sapo_token_loss(unclipped_token_loss: Tensor, temperature: float) -> Tensor:
        """SAPO's gate of each token's ratio, of any shape; its loss is minus the gate times the advantage."""
        return soft_gate(unclipped_token_loss, temperature)
