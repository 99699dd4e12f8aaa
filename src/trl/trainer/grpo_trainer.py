"""Group relative policy optimisation: advantages are relative to the other completions of the prompt."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from trl._lazy import attach
from trl.legacy.interface import LegacyGRPO
from trl.methods.grpo import GRPOMethod
from trl.models.packed.layout import ROLLOUT
from trl.models.scoring.head import ScoreOptions
from trl.objectives.group_policy import entropy_threshold
from trl.reporting.model_card import Paper
from trl.rollouts.experience import CHOSEN, TRAINED, concatenate
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.loaders import on_device
from trl.trainer.online_trainer import OnlineTrainer
from trl.trainer.online_trainer import RolloutFunc as RolloutFunc

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere


class GRPOTrainer(LegacyGRPO, OnlineTrainer):
    """Trainer of group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300) and what came of it.

    Args:
        model: the policy: a causal language model, a `PeftModel`, or a name or path.
        reward_funcs: functions `func(prompts=, completions=, completion_ids=, trainer_state=, **columns)`, async ones
            too, sequence classifiers with one label or their paths, or several of them, whose weighted sum is the
            reward.
        args: a `GRPOConfig`.
        train_dataset: rows with a `prompt` (text or messages) or tokenised, with `input_ids`; other columns are handed
            to reward functions. A stream needs `max_steps`.
        eval_dataset: the same kind of rows, or a dict of several sets by name.
        processing_class: the policy's tokenizer, or its processor where prompts have images; by default the one saved
            with it.
        reward_processing_classes: the tokenizer of each reward model (None for functions).
        callbacks: further callbacks.
        optimizers: an optimizer and a scheduler, instead of those that the config describes.
        peft_config: trains a new adapter of the policy with these settings.
        tools: functions, sync or async, with type hints and docstrings, that the policy may call in its completions.
        completer: a `Completer` of one's own (docs/guides/research.md).
        rollout_func: `func(prompts, trainer)` that generates instead of the policy: a dict with `prompt_ids`,
            `completion_ids`, perhaps `logprobs`, and further fields for the reward functions.
        teacher_model: a model of the same tokenizer, or its name or path, for `teacher_kl_coef`; None with an adapter:
            its base.
        agent: `async def agent(row, base_url, api_key)` that talks to the policy over OpenAI's API and returns its
            reward, or a command (docs/guides/agents.md). `reward_funcs` may be None then.
        environment_factory: makes objects with `reset(**row)`, whose other public methods are tools, and which may have
            a `get_reward`; or a dict of several, among which the column `environment` chooses (docs/guides/agents.md).
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
    method_type = GRPOMethod
    config_type = GRPOConfig

    # ---- the tokens with the highest entropies

    def prepare_step(self, batches: list[Any]) -> None:
        """With `top_entropy_quantile`, choose the tokens of the whole optimiser step, over all processes."""
        super().prepare_step(batches)
        if self.args.top_entropy_quantile >= 1:
            return
        scoring, entropies = self.scoring(), []
        for batch in batches:
            scored = scoring.frozen_logps(on_device(self, {**batch}), ScoreOptions(entropy="scored"))
            assert scored.entropies is not None
            entropies.append(scored.entropies[: len(batch[ROLLOUT].completions.values)].cpu())
        masks = [batch[ROLLOUT].per_token[TRAINED] for batch in batches]
        every = torch.cat(entropies), torch.cat(masks)
        chosen = self.get_high_entropy_mask(*every, 1 - self.args.top_entropy_quantile)
        parts = chosen.split([len(own) for own in entropies])
        is_first_pass = self.state.global_step % self.sizes.steps < self.sizes.mini_batches
        if is_first_pass and self._token_counts is not None:
            rows = concatenate([batch[ROLLOUT] for batch in batches])
            self._token_counts.mask(rows, chosen, copies=self.args.sp_size)
        for batch, own in zip(batches, parts, strict=True):
            batch[ROLLOUT] = batch[ROLLOUT].with_tokens(**{CHOSEN: own})

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """Tokens with an entropy of at least the `threshold` quantile of those in the mask, bool of any shape.

        The quantile is over the tokens of all processes, which must all call it.
        """
        values, inside = entropies.flatten(), mask.flatten()
        table, _ = self.processes.rows(torch.stack([values, inside.to(values.dtype)], dim=1))
        values, inside = table.unbind(dim=1)
        least = entropy_threshold(values, inside, 1 - threshold)
        return (entropies >= least.to(entropies.device)) & mask.bool()
