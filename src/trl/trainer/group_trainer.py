"""What the trainers that learn from groups of completions of one prompt share: GRPO, RLOO and their variants."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from trl.legacy.interface import NOT_CALLED_OF_GROUPS
from trl.models.pairs import shares_prefix
from trl.models.parts import causal_core, check_decoder_only
from trl.models.policy import set_up_policy
from trl.options.training import config_or_default
from trl.rollouts.columns import ADVANTAGE, MEAN_LENGTH, REWARD
from trl.rollouts.experience import Experience
from trl.rollouts.maker import Completer
from trl.rollouts.measures import ClippedExtremes, EvaluationExtremes, extremes_of_processes, of_all_processes
from trl.rollouts.refill import Refill
from trl.rollouts.rollout_func import RolloutFunction, check_rollout_func
from trl.rollouts.token_counts import TokenCounts, sampled_tokens
from trl.tensors.reduce import Weighted
from trl.trainer.group_completions import ShownCompletions
from trl.trainer.group_images import images_of
from trl.trainer.group_method import EQUAL_REWARDS, GroupMethod
from trl.trainer.group_setup import (
    check_engine,
    engine_of,
    prompt_sets,
    reference_of,
    reward_sources,
    sampling_of,
    tool_completer,
    training_prompts,
    with_served_window,
)
from trl.trainer.grpo_config import GroupTraining
from trl.trainer.inherited_settings import settle_inherited
from trl.trainer.method import Outcome
from trl.trainer.online_trainer import OnlineTrainer, evaluation_streams

AnyDataset = Dataset | IterableDataset
RolloutFunc = Callable[[list[Any], Any], Mapping[str, Any]]


class GroupTrainer(OnlineTrainer):
    """Base of the trainers that judge each completion against the others of its prompt.

    A subclass names its `GroupMethod` (rewards, advantages, loss terms) as `method_type`, and its `config_type`.
    """

    _not_called = NOT_CALLED_OF_GROUPS
    args: GroupTraining
    method_type: ClassVar[type[GroupMethod]]
    config_type: ClassVar[type[GroupTraining]]
    method: GroupMethod

    def __init__(
        self,
        model: str | nn.Module | PreTrainedModel,
        reward_funcs: Any | Sequence[Any],
        args: GroupTraining | None = None,
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
        args = config_or_default(args, self.config_type, self._tag_names[-1])
        settle_inherited(args, "rollouts")
        if not (own := rollout_func is None):
            check_rollout_func(rollout_func)
        served = check_engine(args, own=own)
        assert args.num_generations is not None
        self.sizes = replace(args.rollout_sizes(), group=args.num_generations)
        self.evaluation_group = args.num_generations_eval or args.num_generations
        policy = with_served_window(set_up_policy(model, args, processing_class, peft_config), args, served)
        check_decoder_only(causal_core(policy.model))
        self.scorer, self._tokenizer = policy.scorer, policy.tokenizer
        self.shares_prefix = shares_prefix(policy.scorer, args.prefix_sharing)
        sampling = sampling_of(args, policy)
        rewards = reward_sources(reward_funcs, reward_processing_classes, args, policy)
        asks = tool_completer(tools, args, policy, train_dataset, eval_dataset, rollout_func=rollout_func)
        schemas = asks.schemas if asks else None
        self._sets = prompt_sets(args, policy, train_dataset, eval_dataset, tools=schemas, own=own)
        self.images = images_of(self._sets, args, rollout_func)
        self.reference = reference_of(args, policy, model)
        self._extremes = {"train": ClippedExtremes(), "eval": ClippedExtremes()}
        self._largest, self._shown = EvaluationExtremes(), ShownCompletions()
        self._token_counts = TokenCounts(masks_truncated=args.mask_truncated_completions)
        self.method, self.rows_at_once = self.method_type(args), args.per_device_train_batch_size
        super().__init__(
            model=policy.model,
            args=args,
            data_collator=list,  # type: ignore[arg-type]
            train_dataset=training_prompts(self._sets, train_dataset, args),  # type: ignore[arg-type]
            eval_dataset=self._sets.every(eval_dataset),
            processing_class=policy.processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        completer: Completer | None = self.images or asks
        if rollout_func is not None:
            known = {
                "vocabulary": self._sets.settings.vocabulary,
                "context_length": self._sets.context_length,
            }
            completer = RolloutFunction(rollout_func, self, **known)
        refill = Refill(
            args.max_resampling_rounds,
            lacks_variance=partial(self.method.lacks_variance, group_size=self.sizes.group),
            discard=self.discard,
        )
        self.begin_rollouts(
            engine_of(args, self.model, policy, self.accelerator, own=own, served=served),
            sampling,
            rewards,
            shuffle=bool(args.shuffle_dataset),
            completer=completer,
            refill=refill if args.dynamic_sampling else None,
        )
        self.settle_reference()

    # ---- a rollout

    def batch_of(self, experience: Experience) -> dict[str, Any]:
        """With the images of the prompts."""
        return super().batch_of(experience) if self.images is None else self.images.batch(experience)

    def advantages(self, experience: Experience, *, group_size: int | None = None) -> Experience:
        """With rewards and advantages, in groups over all processes, the mean length, and corrections of the sampler's mismatch.

        `group_size` is given in evaluations.
        """
        experience = self.method.with_penalties(experience)
        rows = of_all_processes(experience, self.accelerator)
        rows = rows if group_size is None else self._without_repeats(rows)
        rewards, advantages = self.method.rewards_and_advantages(rows, group_size or self.sizes.group)
        count = len(experience)
        first = self.args.process_index * count
        own = torch.arange(first, first + count).clamp(max=len(rewards) - 1)
        length = self.method.mean_length(rows).expand(count).clone()
        columns = {REWARD: rewards[own], ADVANTAGE: advantages[own], MEAN_LENGTH: length}
        experience = experience.with_rows(**columns)
        counted = torch.arange(count) < (count if group_size is None else self.own_rows())
        found = self.method.corrected(experience, is_exact=self.sampler_is_exact, counted=counted)
        if found is None:
            return experience
        mode = "train" if group_size is None else "eval"
        self.add_measured(mode, {**found.means, **extremes_of_processes(found.extremes)})
        return found.experience

    def _without_repeats(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of an evaluation batch of all processes that accelerate did not repeat to fill it."""
        state = self.accelerator.gradient_state
        repeats = self.args.world_size > 1 and state.end_of_dataloader and state.remainder > 0
        return {name: column[: state.remainder if repeats else None] for name, column in rows.items()}

    def make_rollout_batch(self, number: int) -> Experience:
        """Rollout batch `number` of this run, whose tokens are counted once, however often they are learned from."""
        experience = super().make_rollout_batch(number)
        if self.rollouts.refill is not None:
            self._sums["train"].add_all(self.rollouts.refill.measured)
        added = self._count_sampled(experience)
        self._token_counts.warn_untrained(added)
        if self.args.log_completions:
            advantages = experience.per_row[ADVANTAGE]
            self._shown.gather(experience, self.rollouts.texts, self.rewards.names, advantages=advantages)
        return experience

    def count_seen(self, batch: Mapping[str, Any]) -> None:
        """Tokens are counted when they are generated."""

    def _count_sampled(self, experience: Experience, advantages: Tensor | None = None) -> dict[str, int]:
        """Count the tokens of this process's rows; how many completion tokens of all processes went where."""
        self._tokens_seen = self._tokens_seen + sampled_tokens(experience).to(self.args.device)
        return self._token_counts.add(experience, self.accelerator, advantages)

    def discard(self, experience: Experience) -> None:
        """Count rows of this process that were sampled and are not learned from, as others take their place. All processes
        must call it."""
        self._count_sampled(experience, torch.zeros(len(experience.completions.values)))

    # ---- a step

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """The micro-batches of an optimiser step and what its loss is divided by."""
        self._step_started, self._turns = time.monotonic(), 0
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """One micro-batch, forward and backward; the last of a step says how long it took."""
        loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[arg-type]
        self._turns += 1
        if self._turns == self.sizes.micro_batches:
            seconds = torch.tensor(time.monotonic() - self._step_started)
            self.record("step_time", Weighted(seconds, torch.ones(())))
        return loss

    _step_started, _turns = 0.0, 0

    def _record(self, found: Outcome, own: Tensor) -> None:
        for terms in found.terms:
            self._extremes[self.mode].add(terms.metrics)
        super()._record(found, own)

    # ---- what is logged

    def rollout_metrics(self, experience: Experience, *, share: float) -> dict[str, Weighted]:
        """The documented metrics of a rollout batch."""
        found = self.method.token_metrics(experience)
        rows = of_all_processes(experience, self.accelerator)
        found |= self.method.metrics(rows, self.rewards.names, self.sizes.group, share=share)
        if EQUAL_REWARDS in found and found[EQUAL_REWARDS].mean == 1:
            self._token_counts.warn_only_kl_differs(self.args.beta, metric=EQUAL_REWARDS)
        return found

    def derived_metrics(self, means: dict[str, float]) -> dict[str, float]:
        """With the extremes of what was clipped."""
        mode = "eval" if self._extremes["eval"] else "train"
        of_batches = {**self._largest.drain(), **self._extremes[mode].drain(self.accelerator)}
        return {**super().derived_metrics(means), **of_batches}

    def add_measured(self, mode: str, metrics: Mapping[str, Weighted]) -> None:
        """Record what was measured of a batch of completions: in an evaluation, extremes are those of all of its batches."""
        self._sums[mode].add_all(self._largest.rest(metrics) if mode == "eval" else metrics)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, and with `log_completions` show completions beside a training loss."""
        ends = self.ends_window(logs)
        if ends:
            logs = {**logs, **self._token_counts.logged()}
        super().log(logs, start_time)
        if ends and self.args.log_completions:
            self._shown.show(self)

    # ---- evaluation

    @torch.no_grad()
    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Complete a batch of prompts, judge it as in training, and record what is logged of it, the loss too."""
        columns = {name: [row[name] for row in inputs] for name in inputs[0]}
        streams = evaluation_streams(columns.pop("row"))
        rolled = self.evaluation_rollout(columns, streams)
        experience = self.advantages(rolled, group_size=self.evaluation_group)
        rows = self._without_repeats(of_all_processes(experience, self.accelerator))
        share, size = 1 / self.args.world_size, self.evaluation_group
        self.add_measured("eval", self.method.metrics(rows, self.rewards.names, size, share=share))
        own = min(self.own_rows(), len(inputs))
        experience = experience.take(torch.arange(max(own, 1)))
        batch: Any = self._prepare_inputs(self.micro_batch(experience))  # type: ignore[arg-type]
        found = self.outcome(model, batch)  # a process without a row of its own runs one for the collectives
        if own:
            self._sums["eval"].add_all(self.method.token_metrics(experience))
            self._record(found, self.count_units(batch))
        else:
            self._extremes["eval"].add(found.terms[0].metrics, counted=False)
        return None, None, None

    def begin_evaluation(self, dataloader: DataLoader, prefix: str) -> None:
        """Nothing counts of an earlier evaluation that was broken off."""
        super().begin_evaluation(dataloader, prefix)
        self._forget_extremes("eval")

    def _forget_extremes(self, *modes: str) -> None:
        for mode in modes:
            self._extremes[mode].load_state({})
        self._largest.drain()

    # ---- checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; see `OnlineTrainer.train`. A run counts its tokens, and what is clipped, from 0."""
        if self.args.beta and self.reference is None:
            raise ValueError(
                f"beta={self.args.beta} needs a reference policy, and the trainer was built with beta=0. Set beta in the config "
                "before the trainer is built."
            )
        self._token_counts.load_state({})
        self._forget_extremes("train", "eval")
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def method_state(self) -> dict[str, Any]:
        """What was clipped since the last log, and where the run's tokens went."""
        own = {"extremes": self._extremes["train"].state(), "tokens": self._token_counts.state()}
        return {**super().method_state(), **own}

    def load_method_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `method_state`."""
        super().load_method_state(state)
        self._extremes["train"].load_state(state.get("extremes", {}))
        self._token_counts.load_state(state.get("tokens", {}))
