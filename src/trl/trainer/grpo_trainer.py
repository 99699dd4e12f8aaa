"""Group relative policy optimisation: each completion is judged against the others of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from trl._lazy import attach
from trl.models.lending import undisturbed
from trl.models.scoring.causal import Scored
from trl.models.scoring.head import LossOf, ScoreOptions
from trl.objectives.group_advantages import group_relative
from trl.objectives.group_policy import (
    LOSS_TYPES,
    divisor_share,
    entropy_threshold,
    group_policy_loss,
    soft_gate,
    token_losses,
)
from trl.objectives.sampler_correction import correction, correction_extremes, correction_metrics
from trl.options.training import config_or_default
from trl.rollouts.columns import (
    CHOSEN,
    CORRECTION,
    MEAN_LENGTH,
    OLD,
    SAMPLING_KEPT,
    SAMPLING_LOGPS,
    SCORES,
    TRAINED,
)
from trl.rollouts.experience import Experience
from trl.rollouts.measures import extremes_of_processes
from trl.tensors.reduce import LossTerms
from trl.trainer.group_trainer import AnyDataset, GroupTrainer, RolloutFunc
from trl.trainer.grpo_config import GRPOConfig

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere


class GRPOTrainer(GroupTrainer):
    """Trainer of group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300) and what came of it.

    Args:
        model: the policy: a causal language model, a `PeftModel`, or a name or path.
        reward_funcs: functions `func(prompts=, completions=, completion_ids=, trainer_state=, **columns)`, async ones too,
            sequence classifiers with one label or their paths, or several of them, whose weighted sum is the reward.
        args: a `GRPOConfig`.
        train_dataset: rows with a `prompt` (text or messages) or tokenised, with `input_ids`; other columns are handed to
            reward functions. A stream needs `max_steps`.
        eval_dataset: the same kind of rows, or a dict of several sets by name.
        processing_class: the policy's tokenizer, or its processor where prompts have images; by default the one saved with it.
        reward_processing_classes: the tokenizer of each reward model (None for functions).
        callbacks: further callbacks.
        optimizers: an optimizer and a scheduler, instead of those that the config describes.
        peft_config: trains a new adapter of the policy with these settings.
        tools: functions, sync or async, with type hints and docstrings, that the policy may call in its completions.
        rollout_func: `func(prompts, trainer)` that generates instead of the policy: a dict with `prompt_ids`,
            `completion_ids`, perhaps `logprobs`, and further fields for the reward functions.

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
    _paper: ClassVar[dict[str, str]] = {
        "title": "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
        "id": "2402.03300",
    }
    args: GRPOConfig

    def __init__(
        self,
        model: str | nn.Module | PreTrainedModel,
        reward_funcs: Any | Sequence[Any],
        args: GRPOConfig | None = None,
        train_dataset: AnyDataset | None = None,
        eval_dataset: AnyDataset | dict[str, AnyDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: Any | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any | None = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: RolloutFunc | None = None,
    ) -> None:
        args = config_or_default(args, GRPOConfig, "grpo")
        self.reward_scale = args.scale_rewards  # type: ignore[assignment]
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
        )

    def columns(self, experience: Experience) -> tuple[str, ...]:
        """The old policy's log-probs too, where later steps or the correction need them and the sampler's are not exact."""
        needs = not self.sampler_is_exact and (self.sizes.steps > 1 or self._corrects(experience))
        return (*super().columns(experience), *([OLD] if needs else []))

    def judged_groups(self, rows: Mapping[str, Tensor], group_size: int) -> tuple[Tensor, Tensor]:
        """The rewards, and how far each is above its group's mean."""
        return rows[SCORES], group_relative(rows[SCORES], group_size, scale=self.reward_scale)

    def advantages(self, experience: Experience, *, group_size: int | None = None) -> Experience:
        """With what makes up for a sampler whose log-probs are not the trainer's.

        A loss with weights of whole sequences takes its ratio to the sampler instead of the old policy: far ones fade by themselves.
        """
        experience = super().advantages(experience, group_size=group_size)
        if not self._corrects(experience) or OLD not in experience.per_token:
            return experience
        mask, row = experience.per_token[TRAINED], experience.completions.row_index
        if group_size is not None:
            mask = mask & (row < self.own_rows())
        sampling = experience.per_token[SAMPLING_LOGPS] + experience.per_token.get(SAMPLING_KEPT, 0.0)
        sampling = sampling.to(experience.per_token[OLD].dtype)
        found = correction(
            experience.per_token[OLD],
            sampling,
            mask,
            row,
            len(experience),
            mode=self.args.vllm_importance_sampling_mode,
            cap=self.args.vllm_importance_sampling_cap,
        )
        mode = "train" if group_size is None else "eval"
        extremes = extremes_of_processes(correction_extremes(found, mask))
        self.add_measured(mode, {**correction_metrics(found, mask), **extremes})
        if self._weighs_sequences:
            return experience.with_tokens(**{OLD: sampling})
        return experience.with_tokens(**{CORRECTION: found.factors})

    def old_logps(self, experience: Experience) -> Tensor | None:
        """The sampler's, where a loss takes its ratios to that."""
        to_sampler = self._weighs_sequences and self._corrects(experience)
        return experience.per_token[OLD] if to_sampler else super().old_logps(experience)

    @property
    def _weighs_sequences(self) -> bool:
        """Whether the loss has ratios of its own, of whole sequences."""
        return LOSS_TYPES[self.options.loss_type].ratios is not None

    def _corrects(self, experience: Experience) -> bool:
        wanted = self.args.vllm_importance_sampling_correction and not self.sampler_is_exact
        return wanted and SAMPLING_LOGPS in experience.per_token

    def objective(self, experience: Experience, scored: Scored) -> list[LossTerms]:
        """The loss type's terms."""
        tokens = self.group_tokens(experience)
        return [group_policy_loss(scored.logps, tokens, self.options, entropies=scored.entropies)]

    def token_losses(self, experience: Experience) -> LossOf | None:
        """The same per token, where ratios are those of tokens."""
        return token_losses(self.group_tokens(experience), self.options)

    def divisor(self, experience: Experience) -> Tensor:
        """What the loss type's mean is over."""
        return divisor_share(
            self.options.loss_type,
            experience.per_token[TRAINED],
            len(experience),
            rollout_tokens=experience.per_row[MEAN_LENGTH][0],
            longest=self.args.max_completion_length or 0,
        )

    # ---- the tokens where the policy is least sure

    def prepare_step(self, batches: list[Any]) -> None:
        """With `top_entropy_quantile`, choose the tokens of the whole optimiser step, over all processes."""
        super().prepare_step(batches)
        if self.args.top_entropy_quantile >= 1:
            return
        entropies = [self._entropies(batch) for batch in batches]
        masks = [batch["experience"].per_token[TRAINED] for batch in batches]
        found = self.get_high_entropy_mask(
            torch.cat(entropies), torch.cat(masks), 1 - self.args.top_entropy_quantile
        )
        chosen = found.split([len(own) for own in entropies])
        self.count_masked(batches, chosen)
        for batch, own in zip(batches, chosen, strict=True):
            batch["experience"] = batch["experience"].with_tokens(**{CHOSEN: own})

    @torch.no_grad()
    def _entropies(self, batch: Mapping[str, Any]) -> Tensor:
        inputs: Any = self._prepare_inputs({**batch})
        del inputs["experience"]
        options = ScoreOptions(entropy="scored", temperature=self.sampling.temperature)
        with undisturbed(self.model_wrapped):  # type: ignore[arg-type]
            found = self.score(self.model_wrapped, inputs, options).entropies  # type: ignore[arg-type]
        assert found is not None
        return found.cpu()

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """Which tokens have an entropy of at least the `threshold` quantile of those in the mask, bool of any shape.

        The quantile is over the tokens of all processes, which must all ask.
        """
        least = self._threshold(entropies.flatten(), mask.flatten(), 1 - threshold)
        return (entropies >= least.to(entropies.device)) & mask.bool()

    def compute_liger_loss(self, unwrapped_model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The loss of a micro-batch, as `compute_loss` gives it: no loss here holds the logits of a whole batch."""
        return self.compute_loss(unwrapped_model, inputs)

    @staticmethod
    def get_sapo_token_loss(unclipped_token_loss: Tensor, temperature: float) -> Tensor:
        """SAPO's gate of each token's ratio, of any shape; its loss is minus the gate times the advantage."""
        return soft_gate(unclipped_token_loss, temperature)

    def _threshold(self, entropies: Tensor, mask: Tensor, top: float) -> Tensor:
        if self.accelerator.num_processes > 1:
            table = torch.stack([entropies, mask.to(entropies.dtype)], dim=1).to(self.accelerator.device)
            table = self.accelerator.pad_across_processes(table)
            entropies, mask = self.accelerator.gather(table).cpu().unbind(dim=1)  # type: ignore[union-attr]
        return entropy_threshold(entropies, mask, top)
