"""PPO step by step: a loop of the user's own generates and scores, the trainer updates the policy."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LRScheduler
from transformers import DataCollator, PreTrainedTokenizerBase, set_seed

from trl._lazy import attach
from trl.collators.rows import pad_with_mask
from trl.data.prepared_sets import RowSet
from trl.data.step_inputs import QueryLoader, StepInputs, check_queries, check_step_inputs, make_loader
from trl.models.policy import make_scorer
from trl.models.setup import pad_token_id
from trl.models.switches import empty_cache, holding, undisturbed, without_ddp
from trl.models.value_head import ModelWithValueHead
from trl.objectives.advantages import estimate_statistics, scale_scores, token_rewards
from trl.objectives.kl import AdaptiveKLController, FixedKLController, kl_penalty, probability_ratio
from trl.objectives.ppo import ppo_losses, whitened_estimates
from trl.reporting.step_statistics import MinibatchRecord
from trl.rollouts.experience import ADVANTAGE, OLD, RETURNS, TRAINED, VALUES, Experience
from trl.tensors.moments import RunningMoments, over_processes
from trl.tensors.reduce import count_units, reduce_terms
from trl.tensors.statistics import entropy_from_logits
from trl.trainer import ppo_setup
from trl.trainer.ppo_checks import WarnOnce, check_divergence, check_finite, ratio_is_too_large
from trl.trainer.ppo_config import PPOConfig
from trl.trainer.ppo_responses import (
    Responder,
    join_rows,
    log_distribution,
    responses_as_rows,
    score_responses,
    shuffled_minibatches,
    timed,
)
from trl.trainer.ppo_saving import SavedPolicy

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere


class PPOTrainer(SavedPolicy):
    """Trains a language model with a value head by PPO, one `step` at a time.

    The loop is the caller's: draw queries from `dataloader`, `generate` responses, score them, call `step`. The policy
    is kept near a reference by a penalty on their KL divergence: `ref_model`, the policy without its adapters, or a
    copy of it (of which the first `num_shared_layers` are shared, and frozen). The default `optimizer` is Adam over the
    parameters that train; an `lr_scheduler` is prepared by accelerate and stepped in each `step` (once per process).
    `train_dataset` is another name of `dataset`.

    Example:
        >>> args = PPOConfig(batch_size=8, mini_batch_size=4)
        >>> trainer = PPOTrainer(args, model, tokenizer=tokenizer)  # doctest: +SKIP
        >>> responses = trainer.generate(queries, return_prompt=False, max_new_tokens=16)  # doctest: +SKIP
        >>> stats = trainer.step(queries, responses, [torch.tensor(1.0) for _ in queries])  # doctest: +SKIP
    """

    _tag_names = ("trl", "ppo", "reinforcement-learning")
    _step_tokens: int | None = None  # trained tokens of the current optimiser step, over all processes
    _gradient_is_used: bool = False

    def __init__(
        self, config: PPOConfig | None = None, model: ModelWithValueHead | None = None,
        ref_model: nn.Module | None = None, tokenizer: PreTrainedTokenizerBase | None = None,
        dataset: RowSet | None = None, optimizer: torch.optim.Optimizer | None = None,
        data_collator: DataCollator | None = None, num_shared_layers: int | None = None,
        lr_scheduler: LRScheduler | None = None, training_data_collator: DataCollator | None = None, *,
        train_dataset: RowSet | None = None, **unknown: object,
    ) -> None:  # fmt: skip
        ppo_setup.check_parts(config, model, tokenizer, unknown)
        if type(self).prepare_model_inputs is not PPOTrainer.prepare_model_inputs:
            raise TypeError(
                f"{type(self).__name__} overrides prepare_model_inputs, which step does not call: it scores queries "
                "and responses without padding. Remove the override."
            )
        self._warn_once = WarnOnce()
        if training_data_collator is not None:
            self._warn_once("training_data_collator has no effect: responses are scored without padding.")
        assert config is not None and model is not None and tokenizer is not None  # `check_parts`
        set_seed(config.seed)
        parts = ppo_setup.step_parts(
            config, model, tokenizer, ref_model=ref_model, optimizer=optimizer, lr_scheduler=lr_scheduler,
            num_shared_layers=num_shared_layers,
        )  # fmt: skip
        self.config, self.tokenizer, self.training_data_collator = config, tokenizer, training_data_collator
        self.accelerator, self.scorer, self._limits = parts.accelerator, parts.scorer, parts.limits
        self.model, self.optimizer, self.lr_scheduler = parts.model, parts.optimizer, parts.lr_scheduler
        self.reference, self.ref_model = parts.reference, parts.ref_model
        self.is_encoder_decoder, self.is_peft_model = config.is_encoder_decoder, config.is_peft_model
        self._respond = Responder(self.accelerator, tokenizer, self._limits.start, self._warn_once)
        self.dataset = dataset if dataset is not None else train_dataset
        self.dataloader: QueryLoader | None = None
        if self.dataset is not None:
            self.dataloader = self.prepare_dataloader(self.dataset, data_collator)
        adaptive = AdaptiveKLController(config.init_kl_coef, config.target, config.horizon)
        self.kl_ctl = adaptive if config.adap_kl_ctrl else FixedKLController(config.init_kl_coef)
        self.running = RunningMoments(self.accelerator)
        self.current_device, self.is_distributed = self.accelerator.device, self.accelerator.num_processes > 1
        self.current_step, self.highest_reward = 0, -math.inf

    # ---- the parts of a loop

    def prepare_dataloader(self, dataset: RowSet, data_collator: DataCollator | None = None) -> QueryLoader:
        """A loader of `batch_size` rows per process, shuffled by the seed; incomplete batches are left out.

        Columns that neither the model nor a loop reads are left out of a `datasets.Dataset` (`remove_unused_columns`).
        Without a collator a batch is a dict of lists.
        """
        model = self.accelerator.unwrap_model(self.model)
        return make_loader(
            dataset, batch_size=self.config.batch_size, collate_fn=data_collator, seed=self.config.seed,
            accelerator=self.accelerator, keep=model if self.config.remove_unused_columns else None,
        )  # fmt: skip

    def generate(
        self, query_tensor: Tensor | list[Tensor], length_sampler: Callable[[], int] | None = None,
        batch_size: int = 4, return_prompt: bool = True, generate_ref_response: bool = False,
        **generation_kwargs: Any,
    ) -> Any:  # fmt: skip
        """Responses of the policy to a list of queries: 1-D tensors in a list.

        A single query `(length,)` or rows `(B, length)` give a tensor `(1 or B, length)`, padded on the right.
        Responses begin with the query unless `return_prompt` is False (an encoder-decoder's with its start token), and
        end with their end token. `length_sampler` draws the most new tokens of each. `generation_kwargs` are those of a
        transformers model's `generate`, except beams; `batch_size` has no effect: the engine generates what fits into
        memory. With `generate_ref_response` the reference's responses come as a second result.

        Raises: TypeError, ValueError for a query that is empty, holds no ids of the model's or fills its window, and
        for settings that the engine does not support.
        """
        is_list = isinstance(query_tensor, (list, tuple))
        queries = check_queries(query_tensor if is_list else torch.atleast_2d(query_tensor), self._limits)
        options: Any = {"length_sampler": length_sampler, "return_prompt": return_prompt}
        pad = getattr(self.tokenizer, "pad_token_id", None) or 0

        def respond(model: nn.Module) -> list[Tensor] | Tensor:
            rows = self._respond(model, queries, generation_kwargs, **options)
            return rows if is_list else pad_sequence(rows, batch_first=True, padding_value=pad)

        responses, reference = respond(self.model), None
        if generate_ref_response:
            with torch.no_grad(), self.reference.active(self.model) as model:
                reference = respond(model)
        if self.config.optimize_device_cache:
            empty_cache()
        return (responses, reference) if generate_ref_response else responses

    def step(
        self, queries: list[Tensor], responses: list[Tensor], scores: list[Tensor] | Tensor,
        response_masks: list[Tensor] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Train on `batch_size` queries with their responses and scores; returns the step's statistics.

        All are checked before anything changes. `response_masks` are 0 on response tokens that the policy did not
        choose, such as a tool's answer.

        Raises: TypeError, ValueError for bad input; FloatingPointError, before any update with it, for a loss that is
        not finite and for a divergence from the reference that has exploded.
        """
        inputs = check_step_inputs(
            queries, responses, scores, response_masks,
            batch_size=self.config.batch_size, limits=self._limits, device=self.accelerator.device,
        )  # fmt: skip
        if response_masks is None and inputs.repeats_queries:
            self._warn_once(
                "Every response begins with its whole query (step %d): the policy is trained to repeat it. Generate "
                "with return_prompt=False, or cut the query off.",
                self.current_step + 1,
            )
        times: dict[str, float] = {}
        with timed(times, "total"):
            stats = self._train(inputs, times)
        self.kl_ctl.update(float(stats["objective/kl"]), self.config.batch_size * self.accelerator.num_processes)
        stats["ppo/learning_rate"] = self.optimizer.param_groups[0]["lr"]
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        stats |= {f"time/ppo/{name}": seconds for name, seconds in times.items()}
        self.current_step += 1
        if self.config.optimize_device_cache:
            empty_cache()
        self._push_if_best(inputs.scores)
        self.write_report(stats)
        return stats

    # ---- the mathematics of a step, which subclasses may override. Tensors are `(B, R)`, masks 0 where the policy
    # chose no token

    def compute_rewards(
        self, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, masks: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rewards per token, their part without the score, and the penalty itself, each `(B, R)`.

        `logprobs` and `ref_logprobs` are those of the tokens, or with `kl_penalty="full"` of the whole vocabulary,
        `(B, R, V)`. The score `(B,)` is added on a response's last token.
        """
        kls = kl_penalty(logprobs, ref_logprobs, self.config.kl_penalty)
        rewards, non_score = token_rewards(scores, kls, masks, kl_coef=self.kl_ctl.value)
        return rewards, non_score, kls

    def compute_advantages(self, values: Tensor, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values, advantages whitened over the batch of all processes, and returns, 0 outside of the mask."""
        of_all = partial(over_processes, accelerator=self.accelerator)
        estimates = whitened_estimates(rewards, values, mask, self.config, of_all=of_all)
        return values * (mask != 0).to(values.dtype), estimates.advantages, estimates.returns

    def loss(
        self, old_logprobs: Tensor, values: Tensor, logits: Tensor | None, vpreds: Tensor, logprobs: Tensor,
        mask: Tensor, advantages: Tensor, returns: Tensor, *, entropies: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
        """Policy loss, value loss times `vf_coef`, both means over the minibatch's tokens, and statistics.

        The entropy is that of `logits (B, R, V)` unless `entropies` are given; without either it is left out. Both
        losses are 0 where the mean ratio of probabilities exceeds `ratio_threshold`.
        """
        if entropies is None and logits is not None:
            entropies = entropy_from_logits(logits.detach())
        policy, value, terms = ppo_losses(
            logprobs, vpreds, mask, self.config,
            old_logps=old_logprobs, old_values=values, advantages=advantages, returns=returns, entropies=entropies,
        )  # fmt: skip
        count = count_units(terms)
        losses = reduce_terms(policy, count), self.config.vf_coef * reduce_terms(value, count)
        stats = {name: metric.mean for name, metric in terms.metrics.items()}
        stats |= estimate_statistics(advantages, returns, values, mask)
        step, limit = self.current_step + 1, self.config.ratio_threshold
        if ratio_is_too_large(terms.metrics["policy/ratio"], limit, self.accelerator, self._warn_once, step=step):
            losses = losses[0] * 0, losses[1] * 0
            stats |= {name: torch.zeros_like(stats[name]) for name in stats if name.startswith("loss/")}
        stats["policy/ratio"] = probability_ratio(logprobs.detach(), old_logprobs, mask)[mask != 0]
        stats["policy/advantages"] = advantages[mask != 0]
        return *losses, stats

    def train_minibatch(
        self, old_logprobs: Tensor, values: Tensor, logprobs: Tensor, logits: Tensor | None, vpreds: Tensor,
        mask: Tensor, advantages: Tensor, returns: Tensor, *, entropies: Tensor | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """The loss of one minibatch, backward, and with the last of an optimiser step's minibatches the update.

        Inside `step` a token counts alike in whichever minibatch or process of an optimiser step it is. Returns the
        statistics of `loss`.

        Raises: FloatingPointError for a loss or gradient that is not finite, before the update.
        """
        policy_loss, value_loss, stats = self.loss(
            old_logprobs, values, logits, vpreds, logprobs, mask, advantages, returns, entropies=entropies
        )
        loss = policy_loss + value_loss
        if self._step_tokens is not None:  # of the mean over the optimiser step, what this minibatch adds
            # accelerate divides by the number of minibatches, DDP, FSDP and DeepSpeed by that of processes.
            averaged = self.accelerator.num_processes * self.accelerator.gradient_accumulation_steps
            loss = loss * (float((mask != 0).sum()) * averaged / self._step_tokens)
        check_finite("loss", float(loss.detach()), step=self.current_step + 1)
        if self._gradient_is_used:  # only outside of `step`, which has cleared it
            self._clear_gradient()
        self.accelerator.backward(loss)
        if self.accelerator.sync_gradients:
            limit = self.config.max_grad_norm or math.inf
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
            if norm is not None and self.accelerator.scaler is None:  # fp16 leaves such updates out by itself
                check_finite("the gradient's norm", float(norm), step=self.current_step + 1)
            self.optimizer.step()
            self._gradient_is_used = True
        return stats

    def _clear_gradient(self) -> None:
        """Clear the gradient of the last update, which stays in place until the next begins: programs read it."""
        self.model.zero_grad()
        if self.accelerator.state.deepspeed_plugin is None:  # DeepSpeed clears its own
            # Under FSDP2 the model may hold gathered parameters; those with gradients are the optimiser's.
            getattr(self.optimizer, "optimizer", self.optimizer).zero_grad()
        self._gradient_is_used = False

    # ---- forward passes

    def prepare_model_inputs(self, queries: list[Tensor], responses: list[Tensor]) -> dict[str, Tensor]:
        """Padded inputs of a model on the trainer's device, `(B, T)` each: `input_ids` and `attention_mask` of query
        and response. An encoder-decoder's are those of the queries, and `decoder_...` those of the responses.

        For programs that call a model themselves; `step` scores without padding and does not use it.
        """
        joined = [torch.cat(row) for row in zip(queries, responses, strict=True)]
        parts = {"": queries, "decoder_": responses} if self.is_encoder_decoder else {"": joined}
        inputs: dict[str, Tensor] = {}
        for prefix, rows in parts.items():
            ids, mask = pad_with_mask(rows, pad_token_id(self.tokenizer), side=self.tokenizer.padding_side)
            inputs |= {f"{prefix}input_ids": ids, f"{prefix}attention_mask": mask}
        return {name: value.to(self.accelerator.device) for name, value in inputs.items()}

    def batched_forward_pass(
        self,
        model: nn.Module,
        queries: list[Tensor],
        responses: list[Tensor],
        model_inputs: dict[str, Any] | None = None,
        return_logits: bool = False,
        response_masks: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """Log-probs, logits (None unless `return_logits`), values and masks of responses, `(B, R)`; logits `(B, R, V)`.

        `model` is this trainer's, its reference, or another with or (values are None) without a value head.
        `model_inputs` are ignored.
        """
        del model_inputs
        scorer, model = self._scorer_of(model)
        rows, parts = responses_as_rows(queries, responses), []
        for part in torch.arange(len(rows), device=rows.completions.values.device).split(self.config.mini_batch_size):
            with self.accelerator.autocast():
                parts.append(score_responses(scorer, model, rows.take(part), logits=return_logits))
        logps, values, _, logits = map(join_rows, zip(*parts, strict=True))
        masks = response_masks or [torch.ones_like(response) for response in responses]
        return logps, logits, values, pad_sequence(masks, batch_first=True)

    def _scorer_of(self, model: nn.Module) -> tuple[Any, nn.Module]:
        """The scorer of a model, and the module to call: of a reference with a value head the model inside."""
        if self.accelerator.unwrap_model(model) is self.scorer.wrapper:
            return self.scorer, model
        scored = getattr(self.reference, "model", None)
        inner = getattr(model, "pretrained_model", model)
        if scored is not None and (model is scored or inner is getattr(self.reference, "module", None)):
            return self.reference.scorer, scored
        return make_scorer(model, self.tokenizer), model

    @torch.no_grad()
    def _score_rollout(self, inputs: StepInputs, scores: Tensor, times: dict[str, float]) -> tuple[Tensor, ...]:
        """Log-probs of policy and reference, values, masks, rewards, rewards without the score and KL, all `(B, R)`."""
        is_full = self.config.kl_penalty == "full"  # whole distributions are held for one minibatch at a time
        parts, policy = [], without_ddp(self.model)
        for rows in torch.arange(len(scores)).split(self.config.mini_batch_size if is_full else len(scores)):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            texts = inputs.queries[part], inputs.responses[part]
            options: dict[str, Any] = {"return_logits": is_full, "response_masks": inputs.masks[part]}
            with timed(times, "forward_pass"):
                with undisturbed(policy):
                    logps, logits, values, masks = self.batched_forward_pass(policy, *texts, **options)
                with self.reference.active(self.model) as reference:
                    ref_logps, ref_logits, *_ = self.batched_forward_pass(reference, *texts, **options)
            with timed(times, "compute_rewards"):
                compared = logps, ref_logps
                if logits is not None and ref_logits is not None:
                    compared = log_distribution(logits), log_distribution(ref_logits)
                rewards, non_score, kls = self.compute_rewards(scores[part], *compared, masks)
            parts.append((logps, ref_logps, values, masks, rewards, non_score, kls))
        return tuple(join_rows(columns) for columns in zip(*parts, strict=True))

    # ---- inside of a step

    def _train(self, inputs: StepInputs, times: dict[str, float]) -> dict[str, Any]:
        scores = self._scaled(inputs.scores)
        logps, ref_logps, values, masks, rewards, non_score, kls = self._score_rollout(inputs, scores, times)
        check_divergence(
            kls, kls if self.config.kl_penalty == "full" else logps - ref_logps, masks,
            accelerator=self.accelerator, step=self.current_step + 1, target=self.config.target, warn=self._warn_once,
        )  # fmt: skip
        with timed(times, "compute_advantages"):
            values, advantages, returns = self.compute_advantages(values, rewards, masks)
        rows = responses_as_rows(inputs.queries, inputs.responses)
        columns = {OLD: logps, VALUES: values, ADVANTAGE: advantages, RETURNS: returns, TRAINED: masks}
        mask = rows.completions.mask
        rows = rows.with_tokens(**{name: column[mask] for name, column in columns.items()})
        kl_coef = self.kl_ctl.value
        with timed(times, "optimize_step"):
            train_stats = self._optimise(rows)
        with timed(times, "calc_stats"):
            return self.record_step_stats(
                kl_coef, scores=scores, logprobs=logps, ref_logprobs=ref_logps, non_score_reward=non_score, kls=kls,
                masks=masks, queries=inputs.queries, responses=inputs.responses, train_stats=train_stats,
            )  # fmt: skip

    def _scaled(self, scores: Tensor) -> Tensor:
        config, clip = self.config, self.config.score_clip
        if config.use_score_scaling:
            self.running.update(scores)
            mean = self.running.mean if config.use_score_norm else 0.0
            return scale_scores(scores, mean=mean, std=self.running.std, clip=clip)
        return scores if clip is None else scores.clamp(-clip, clip)

    def _optimise(self, rollout: Experience) -> dict[str, Tensor]:
        """All epochs over a rollout; the statistics of its minibatches."""
        record, config = MinibatchRecord(self.accelerator), self.config
        self.accelerator.step = 0  # of accumulation: an optimiser step begins here
        cut = config.batch_size, config.mini_batch_size, config.gradient_accumulation_steps
        in_train_mode = holding(list(self.model.modules()), "training", True)
        with ppo_setup.accumulating(self.accelerator, config), in_train_mode:
            self.model.train()  # a model may keep some of its modules in the other mode
            for _ in range(config.ppo_epochs):
                for minibatches in shuffled_minibatches(*cut):
                    record.begin()
                    parts = [rollout.take(torch.tensor(rows, device=self.accelerator.device)) for rows in minibatches]
                    self._optimiser_step(parts, record)
                if config.early_stopping and record.last("policy/policykl") > 1.5 * config.target_kl:
                    break
        return record.summary()

    def _optimiser_step(self, minibatches: list[Experience], record: MinibatchRecord) -> None:
        self._clear_gradient()
        counts = [(part.per_token[TRAINED] != 0).sum() for part in minibatches]
        self._step_tokens = int(self.accelerator.reduce(torch.stack(counts).sum(), reduction="sum"))  # type: ignore[arg-type]
        try:
            for part, count in zip(minibatches, counts, strict=True):
                column = {name: part.ragged(name).padded() for name in part.per_token}
                with self.accelerator.accumulate(self.model):
                    with self.accelerator.autocast():
                        scored = score_responses(self.scorer, self.model, part, entropies=True)
                    assert scored.values is not None
                    stats = self.train_minibatch(
                        column[OLD], column[VALUES], scored.logps, None, scored.values, column[TRAINED],
                        column[ADVANTAGE], column[RETURNS], entropies=scored.entropies,
                    )  # fmt: skip
                record.add(int(count), stats)
        finally:
            self._step_tokens = None
