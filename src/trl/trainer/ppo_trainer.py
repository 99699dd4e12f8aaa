"""PPO step by step: a loop of the user's own generates and scores, the trainer updates the policy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import set_seed

from trl._lazy import attach
from trl.data.query_loader import QueryLoader, make_loader
from trl.data.step_inputs import StepInputs, check_step_inputs
from trl.models.step_state import load_step_state, moments_state, save_step_state
from trl.models.switches import empty_cache
from trl.objectives.advantages import scale_scores
from trl.objectives.kl import AdaptiveKLController, FixedKLController
from trl.reporting.ppo_statistics import DivergenceWatch, MinibatchRecord, mean_over_rows, step_statistics
from trl.reporting.step_statistics import stats_to_np
from trl.rollouts.minibatches import Rollout, shuffled_minibatches, tokens_of_step
from trl.rollouts.response_scores import ResponseScorer
from trl.tensors.moments import RunningMoments, moments, over_processes
from trl.trainer import ppo_setup
from trl.trainer.ppo_config import PPOConfig
from trl.trainer.ppo_forward import ScoredRollout, ScoresRollouts, timed
from trl.trainer.ppo_generation import GeneratesResponses
from trl.trainer.ppo_losses import PPOLosses, training
from trl.trainer.ppo_saving import SavesPolicy

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere

logger = logging.getLogger(__name__)


class PPOTrainer(GeneratesResponses, ScoresRollouts, PPOLosses, SavesPolicy):
    """Trains a language model with a value head by PPO, one `step` at a time.

    The loop is the caller's: draw queries from `dataloader`, `generate` responses, score them, call `step`. The policy
    is kept near a reference by a penalty on their KL divergence: `ref_model`, the policy without its adapters, or a copy of
    it (of which the first `num_shared_layers` are shared, and frozen). Without an `optimizer` one is made (Adam), over the
    parameters that train; an `lr_scheduler` is prepared by accelerate and stepped in each `step` (once per process). `train_dataset` is another name of `dataset`.

    Example:
        >>> trainer = PPOTrainer(PPOConfig(batch_size=8, mini_batch_size=4), model, tokenizer=tokenizer)  # doctest: +SKIP
        >>> responses = trainer.generate(queries, return_prompt=False, max_new_tokens=16)  # doctest: +SKIP
        >>> stats = trainer.step(queries, responses, [torch.tensor(1.0) for _ in queries])  # doctest: +SKIP
    """

    def __init__(
        self,
        config: PPOConfig | None = None,
        model: Any = None,
        ref_model: Any = None,
        tokenizer: Any = None,
        dataset: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
        data_collator: Callable | None = None,
        num_shared_layers: int | None = None,
        lr_scheduler: Any = None,
        training_data_collator: Callable | None = None,
        *,
        train_dataset: Any = None,
        **unknown: Any,
    ) -> None:
        ppo_setup.check_parts(config, model, tokenizer, unknown)
        if type(self).prepare_model_inputs is not PPOTrainer.prepare_model_inputs:
            raise TypeError(
                f"{type(self).__name__} overrides prepare_model_inputs, which step does not call: it scores queries and "
                "responses without padding. Remove the override."
            )
        if training_data_collator is not None:
            logger.warning(
                "training_data_collator has no effect: responses are scored without padding. Leave it out."
            )
        assert config is not None
        set_seed(config.seed)
        self.config, self.tokenizer = config, tokenizer
        self.accelerator = ppo_setup.make_accelerator(config)
        self.is_encoder_decoder = config.is_encoder_decoder = bool(model.config.is_encoder_decoder)
        self.is_peft_model = config.is_peft_model = bool(model.is_peft_model)
        if config.gradient_checkpointing:
            ppo_setup.enable_checkpointing(model)
        ppo_setup.check_optimiser(model, optimizer, lr_scheduler)
        scorer = ppo_setup.policy_scorer(model, tokenizer)
        self.reference, self.ref_model = ppo_setup.set_up_reference(
            model, ref_model, tokenizer, scorer, num_shared_layers
        )
        self._limits = ppo_setup.token_limits(model)
        ppo_setup.start_trackers(self.accelerator, config)
        optimizer = optimizer or ppo_setup.make_adam(model, config.learning_rate)
        with ppo_setup.accumulating(self.accelerator, config):
            parts = self.accelerator.prepare(
                model, optimizer, *([] if lr_scheduler is None else [lr_scheduler])
            )
        self.model, self.optimizer, self.lr_scheduler = (
            *parts[:2],
            parts[2] if lr_scheduler is not None else None,
        )
        self.reference.prepare(self.accelerator)
        self.training_data_collator = training_data_collator
        self._scorer = ResponseScorer(scorer, is_encoder_decoder=self.is_encoder_decoder)
        self._responders = []
        self.dataset = dataset if dataset is not None else train_dataset
        self.dataloader: QueryLoader | None = None
        if self.dataset is not None:
            self.dataloader = self.prepare_dataloader(self.dataset, data_collator)
        adaptive = AdaptiveKLController(config.init_kl_coef, config.target, config.horizon)
        self.kl_ctl = adaptive if config.adap_kl_ctrl else FixedKLController(config.init_kl_coef)
        self.running = RunningMoments(self.accelerator)
        self.current_device, self.is_distributed = self.accelerator.device, self.accelerator.num_processes > 1
        self.current_step, self.highest_reward = 0, float("-inf")
        self._watch, self._said_repeats = DivergenceWatch(config.target), False

    # ---- the parts of a loop

    def prepare_dataloader(self, dataset: Any, data_collator: Callable | None = None) -> QueryLoader:
        """A loader of `batch_size` rows per process, shuffled by the seed; incomplete batches are left out.

        Columns that neither the model nor a loop reads are left out of a `datasets.Dataset` (`remove_unused_columns`).
        Without a collator a batch is a dict of lists.
        """
        model = self.accelerator.unwrap_model(self.model)
        return make_loader(
            dataset,
            batch_size=self.config.batch_size,
            collate_fn=data_collator,
            seed=self.config.seed,
            accelerator=self.accelerator,
            keep=model if self.config.remove_unused_columns else None,
        )

    def step(
        self,
        queries: list[Tensor],
        responses: list[Tensor],
        scores: list[Tensor] | Tensor,
        response_masks: list[Tensor] | None = None,
    ) -> dict[str, Any]:
        """Train on `batch_size` queries with their responses and scores; returns the step's statistics.

        All are checked before anything changes. `response_masks` are 0 on response tokens that the policy did not choose,
        such as a tool's answer.

        Raises: TypeError, ValueError for bad input; FloatingPointError, before any update with it, for a loss that is not finite
        and for a divergence from the reference that has exploded.
        """
        inputs = check_step_inputs(
            queries, responses, scores, response_masks,
            batch_size=self.config.batch_size, limits=self._limits, device=self.accelerator.device,
        )  # fmt: skip
        self._speak_of_repeated_queries(inputs, response_masks)
        times: dict[str, float] = {}
        with timed(times, "total"):
            stats = self._train(inputs, times)
        self.kl_ctl.update(
            float(stats["objective/kl"]), self.config.batch_size * self.accelerator.num_processes
        )
        stats["ppo/learning_rate"] = self.optimizer.param_groups[0]["lr"]
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        stats |= {f"time/ppo/{name}": seconds for name, seconds in times.items()}
        self.current_step += 1
        self._release_memory()
        self._push_if_best(inputs.scores)
        return stats

    def record_step_stats(self, kl_coef: float, **data: Any) -> dict[str, Any]:
        """The statistics of a step by their documented names, as numbers and numpy arrays.

        `data`: what `step_statistics` takes. All processes must call it.
        """
        found = step_statistics(kl_coef=kl_coef, accelerator=self.accelerator, **data)
        return stats_to_np(found)

    def gather_stats(self, stats: Mapping[str, Any]) -> dict[str, Any]:
        """Statistics with each tensor replaced by its mean over all processes, which must all call it."""
        return {
            name: self.accelerator.reduce(value, reduction="mean") if isinstance(value, Tensor) else value
            for name, value in stats.items()
        }

    # ---- what a killed loop needs

    def save_state(self, output_dir: str | Path) -> None:
        """Write everything that the loop carries into a folder, at once or not at all: between two steps, by all processes.

        Weights, optimiser, scheduler, KL coefficient, running moments, random streams, the loader's place.
        """
        state = {
            "current_step": self.current_step,
            "kl_coef": self.kl_ctl.value,
            "running": moments_state(self.running),
            "highest_reward": self.highest_reward,
            "loader": None if self.dataloader is None else self.dataloader.state_dict(),
        }
        save_step_state(output_dir, self.accelerator, state, self.lr_scheduler)

    def load_state(self, input_dir: str | Path) -> None:
        """Go on from a folder of `save_state`, with a trainer that was built as that one was.

        The next pass over `dataloader` begins behind the last batch that was handed out before.
        """
        state = load_step_state(input_dir, self.accelerator, self.lr_scheduler)
        self.current_step, self.highest_reward = state["current_step"], state["highest_reward"]
        self.kl_ctl.value = state["kl_coef"]
        self.running = RunningMoments(self.accelerator, **state["running"])
        if self.dataloader is not None and state["loader"] is not None:
            self.dataloader.load_state_dict(state["loader"])

    # ---- inside of a step

    def _train(self, inputs: StepInputs, times: dict[str, float]) -> dict[str, Any]:
        scores = self._scaled(inputs.scores)
        found = self.score_rollout(inputs, scores, times)
        self._watch_divergence(found)
        with timed(times, "compute_advantages"):
            values, advantages, returns = self.compute_advantages(found.values, found.rewards, found.masks)
        rollout = Rollout(
            inputs.queries, inputs.responses, found.logps, values, advantages, returns, found.masks
        )
        kl_coef = self.kl_ctl.value
        with timed(times, "optimize_step"):
            train_stats = self._optimise(rollout)
        with timed(times, "calc_stats"):
            return self.record_step_stats(
                kl_coef, scores=scores, logprobs=found.logps, ref_logprobs=found.ref_logps,
                non_score_reward=found.non_score, kls=found.kls, masks=found.masks,
                queries=inputs.queries, responses=inputs.responses, train_stats=train_stats,
            )  # fmt: skip

    def _scaled(self, scores: Tensor) -> Tensor:
        config, clip = self.config, self.config.score_clip
        if config.use_score_scaling:
            self.running.update(scores)
            mean = self.running.mean if config.use_score_norm else 0.0
            return scale_scores(scores, mean=mean, std=self.running.std, clip=clip)
        return scores if clip is None else scores.clamp(-clip, clip)

    def _watch_divergence(self, found: ScoredRollout) -> None:
        differences = found.kls if self.config.kl_penalty == "full" else found.logps - found.ref_logps
        kl, _ = mean_over_rows(found.kls, found.masks, self.accelerator)
        _, per_token = mean_over_rows(differences, found.masks, self.accelerator)
        self._watch.check(kl, per_token, step=self.current_step + 1)

    def _optimise(self, rollout: Rollout) -> dict[str, Tensor]:
        """All epochs over a rollout; the statistics of its minibatches."""
        record, config = MinibatchRecord(), self.config
        self.accelerator.step = 0  # of accumulation: an optimiser step begins here
        with ppo_setup.accumulating(self.accelerator, config), training(self.model):
            for _ in range(config.ppo_epochs):
                for minibatches in shuffled_minibatches(
                    config.batch_size, config.mini_batch_size, config.gradient_accumulation_steps
                ):
                    self._optimiser_step(rollout, minibatches, record)
                if (
                    config.early_stopping
                    and record.last("policy/policykl", self.accelerator) > 1.5 * config.target_kl
                ):
                    break
        return record.summary(self.accelerator)

    def _optimiser_step(
        self, rollout: Rollout, minibatches: list[list[int]], record: MinibatchRecord
    ) -> None:
        record.begin()
        self._clear_gradient()
        self._step_tokens = tokens_of_step(rollout.masks, minibatches, self.accelerator)
        try:
            for rows in minibatches:
                part = rollout.take(rows)
                with self.accelerator.accumulate(self.model):
                    with self.accelerator.autocast():
                        scored = self._scorer.score(self.model, part.queries, part.responses, entropies=True)
                    assert scored.values is not None
                    stats = self.train_minibatch(
                        part.logps, part.values, scored.logps, None, scored.values, part.masks,
                        part.advantages, part.returns, entropies=scored.entropies,
                    )  # fmt: skip
                record.add(int((part.masks != 0).sum()), stats)
        finally:
            self._step_tokens = None

    def _speak_of_repeated_queries(self, inputs: StepInputs, masks: Any) -> None:
        if self._said_repeats or masks is not None or not inputs.repeats_queries:
            return
        self._said_repeats = True
        logger.warning(
            "Every response begins with its whole query (step %d): the policy is trained to repeat it. Generate with "
            "return_prompt=False, or cut the query off.",
            self.current_step + 1,
        )

    def _release_memory(self) -> None:
        if self.config.optimize_device_cache:
            empty_cache()

    def _push_if_best(self, scores: Tensor) -> None:
        """Scores as they were given: scaled ones of two steps cannot be compared."""
        push = self.config.options("push_to_hub_if_best_kwargs")
        if not push or self.current_step % self.config.compare_steps:
            return
        reward = float(over_processes(moments(scores), self.accelerator).mean)
        if reward > self.highest_reward:
            self.highest_reward = reward
            self.push_to_hub(**push)
