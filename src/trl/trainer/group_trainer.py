"""What the trainers that learn from groups of completions of one prompt share: GRPO, RLOO and their variants."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from trl.legacy.interface import NOT_CALLED_OF_GROUPS
from trl.models.lending import without_ddp
from trl.models.pairs import shares_prefix
from trl.models.parts import causal_core, check_decoder_only
from trl.models.policy import set_up_policy
from trl.models.scoring.head import ScoreOptions
from trl.objectives.group_advantages import Scale, has_no_variance
from trl.objectives.group_policy import GroupOptions, GroupTokens
from trl.rewards.inputs import RewardInputs
from trl.rewards.models import place_reward_models
from trl.rollouts.columns import (
    ADVANTAGE,
    CHOSEN,
    CORRECTION,
    LENGTH,
    MEAN_LENGTH,
    OLD,
    REF,
    REWARD,
    SCORES,
    STOPPED,
    TOOL_OUTPUT,
    TRAINED,
)
from trl.rollouts.experience import Experience, concatenate
from trl.rollouts.group_sizes import check_evaluation
from trl.rollouts.maker import Completer
from trl.rollouts.measures import ClippedExtremes, EvaluationExtremes, measured_groups, of_all_processes
from trl.rollouts.refill import Refill
from trl.rollouts.rollout_func import RolloutFunction, check_rollout_func
from trl.rollouts.token_counts import TokenCounts, sampled_tokens, token_advantages
from trl.rollouts.tool_completer import tool_metrics
from trl.tensors.reduce import LossTerms, Weighted, reduce_terms, where_counted
from trl.trainer.group_completions import ShownCompletions
from trl.trainer.group_images import images_of
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
from trl.trainer.method import LOSS_PARTS, Outcome
from trl.trainer.online_trainer import OnlineTrainer, evaluation_streams

AnyDataset = Dataset | IterableDataset
RolloutFunc = Callable[[list[Any], Any], Mapping[str, Any]]


class GroupTrainer(OnlineTrainer):
    """Base of the trainers that judge each completion against the others of its prompt.

    A method overrides `judged_groups` (rewards and advantages), `objective` and `divisor` (what its loss is divided by).
    """

    _not_called = NOT_CALLED_OF_GROUPS
    args: GroupTraining
    repeats_metrics: ClassVar[bool] = False
    reward_scale: Scale = "group"

    def __init__(
        self,
        model: str | nn.Module | PreTrainedModel,
        reward_funcs: Any | Sequence[Any],
        args: GroupTraining,
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
        self._asked: tuple[str, ...] = ()
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
        refill = Refill(args.max_resampling_rounds, lacks_variance=self.lacks_variance, discard=self.discard)
        self.begin_rollouts(
            engine_of(args, self.model, policy, self.accelerator, own=own, served=served),
            sampling,
            rewards,
            shuffle=bool(args.shuffle_dataset),
            completer=completer,
            refill=refill if args.dynamic_sampling else None,
        )
        if own:
            self.check_reward_columns()
        place_reward_models(self.rewards.models, self.accelerator)
        self.settle_reference()

    @property
    def options(self) -> GroupOptions:
        """The settings of the loss, as the config has them now."""
        return self.args.group_options()

    # ---- the hooks of a method

    def judged_groups(self, rows: Mapping[str, Tensor], group_size: int) -> tuple[Tensor, Tensor]:
        """What the completions of all processes are worth, and their advantages: `(N,)` each, NaN where no source has an
        opinion. `rows` holds the columns per row."""
        raise TypeError(f"{type(self).__name__} must override judged_groups.")

    def given_rewards(self, rows: Mapping[str, Tensor]) -> Tensor:
        """The sources' rewards `(N,)` as the method reads them: where a group's are all equal they teach nothing."""
        return rows[SCORES]

    def divisor(self, experience: Experience) -> Tensor:
        """What some rows add to the number that an optimiser step's loss is divided by, 0-dim."""
        return torch.tensor(len(experience))

    def learned_length(self, rows: Mapping[str, Tensor]) -> Tensor:
        """The mean length in tokens of the completions that a rollout batch is learned from, 0-dim."""
        return rows[LENGTH].mean()

    def columns(self, experience: Experience) -> tuple[str, ...]:
        """Which of `old_logps` and `ref_logps` are asked of the models after a rollout."""
        return (REF,) if self.reference is not None else ()

    # ---- a rollout

    def batch_of(self, experience: Experience) -> dict[str, Any]:
        """With the images of the prompts."""
        return super().batch_of(experience) if self.images is None else self.images.batch(experience)

    def judge(
        self, experience: Experience, scores: Tensor, inputs: RewardInputs, *, training: bool
    ) -> Experience:
        """With `scores` (NaN: none) and, per token, `trained`: not where there is no reward, nor, with
        `mask_truncated_completions`, where a completion did not end; never what tools answered."""
        rows = ~scores.isnan()
        if self.args.mask_truncated_completions:
            rows = rows & experience.per_row[STOPPED].bool()
        trained = rows[experience.completions.row_index]
        if TOOL_OUTPUT in experience.per_token:
            trained = trained & ~experience.per_token[TOOL_OUTPUT].bool()
        return experience.with_rows(**{SCORES: scores}).with_tokens(**{TRAINED: trained})

    def score_rollout(self, batch: dict[str, Any], *, learning: bool) -> dict[str, Tensor]:
        """Log-probs of reference and policy, as far as they are asked for."""
        options, found = ScoreOptions(temperature=self.sampling.temperature), {}
        with self.accelerator.autocast():
            if OLD in self._asked:
                policy = without_ddp(self.model_wrapped)  # type: ignore[arg-type]
                found[OLD] = self.scorer.score(policy, batch, options).logps
            if REF in self._asked:
                assert self.reference is not None
                found[REF] = self.reference.score(
                    self.model_wrapped,  # type: ignore[arg-type]
                    batch,
                    lambda scorer, ref, rows: scorer.score(ref, rows, options).logps,
                )
        return found

    def _score_tokens(self, experience: Experience, *, learning: bool) -> dict[str, Tensor]:
        self._asked = tuple(name for name in self.columns(experience) if name not in experience.per_token)
        return super()._score_tokens(experience, learning=learning) if self._asked else {}

    def advantages(self, experience: Experience, *, group_size: int | None = None) -> Experience:
        """With rewards and advantages, in groups over all processes, and each row's share of the rollout batch's tokens."""
        rows = of_all_processes(experience, self.accelerator)
        rows = rows if group_size is None else self._without_repeats(rows)
        rewards, advantages = self.judged_groups(rows, group_size or self.sizes.group)
        first = self.args.process_index * len(experience)
        own = torch.arange(first, first + len(experience)).clamp(max=len(rewards) - 1)
        share = self._mean_length(rows, experience)
        return experience.with_rows(**{REWARD: rewards[own], ADVANTAGE: advantages[own], MEAN_LENGTH: share})

    def _without_repeats(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of an evaluation batch of all processes that accelerate did not repeat to fill it."""
        state = self.accelerator.gradient_state
        repeats = self.args.world_size > 1 and state.end_of_dataloader and state.remainder > 0
        return {name: column[: state.remainder if repeats else None] for name, column in rows.items()}

    def _mean_length(self, rows: Mapping[str, Tensor], experience: Experience) -> Tensor:
        return self.learned_length(rows).expand(len(experience)).clone()

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

    def count_masked(self, batches: Sequence[Mapping[str, Any]], chosen: Sequence[Tensor]) -> None:
        """Count the tokens of an optimiser step's micro-batches that are not `chosen` as masked, in the first pass over a
        window. All processes must call it."""
        if self.state.global_step % self.sizes.steps < self.sizes.mini_batches:
            rows = concatenate([batch["experience"] for batch in batches])
            self._token_counts.mask(rows, torch.cat(list(chosen)), self.accelerator)

    # ---- dynamic sampling

    def lacks_variance(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Which groups have rewards that are all equal, bool `(N / G,)`; `rows` holds the columns per row of whole groups."""
        return has_no_variance(self.given_rewards(rows), self.sizes.group)

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

    def group_tokens(self, experience: Experience) -> GroupTokens:
        """What the objectives know of a micro-batch; the old policy is this one where nobody was asked.

        A column `advantage` per token comes before that per row.
        """
        columns, sequence = experience.per_token, experience.completions.row_index
        return GroupTokens(
            self.old_logps(experience),
            token_advantages(experience),
            columns[TRAINED],
            sequence,
            len(experience),
            columns.get(REF),
            columns.get(CORRECTION),
            columns.get(CHOSEN),
        )

    def old_logps(self, experience: Experience) -> Tensor | None:
        """What ratios are taken to, `(K,)`; None for the policy that is scored itself, in the first optimiser step of a rollout batch:
        there dropout, and how a batch is laid out in low precision, are no change of the policy."""
        first = self.mode == "train" and self.state.global_step % self.sizes.steps == 0
        return None if first else experience.per_token.get(OLD)

    def count_units(self, batch: Mapping[str, Any]) -> Tensor:
        """A micro-batch's `divisor`, `(1,)`."""
        return self.divisor(batch["experience"]).view(1)

    def loss_of(self, found: Outcome, own: Tensor, step: Tensor) -> Tensor:
        """A micro-batch's part of the step's loss."""
        parts = [reduce_terms(terms, step[0]) for terms in found.terms]
        return sum(parts, start=torch.zeros(())) + self.router_part(found, own, step)

    def _record(self, found: Outcome, own: Tensor) -> None:
        for terms in found.terms:
            self._extremes[self.mode].add(terms.metrics)
            for name, value in terms.metrics.items():
                self.record(name, value)
        if self.mode == "eval":  # the terms share one divisor, which counts once
            total = torch.stack([_total(terms) for terms in found.terms]).sum()
            self.record(LOSS_PARTS + found.terms[0].per, Weighted(total, own[0]))
        self.record_router(found, own)

    # ---- what is logged

    def rollout_metrics(self, experience: Experience, *, share: float) -> dict[str, Weighted]:
        """The documented numbers of a window."""
        return self._measured(of_all_processes(experience, self.accelerator), self.sizes.group, share)

    def _measured(self, rows: Mapping[str, Tensor], group_size: int, share: float) -> dict[str, Weighted]:
        found = measured_groups(rows, self.rewards.names, group_size, scale=self.reward_scale, share=share)
        return {**found, **tool_metrics(rows, share=share)}

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

    def prepared_prompts(self, dataset: Any) -> Dataset:
        """A set that is given to `evaluate`, with its prompts tokenised."""
        check_evaluation(self.args.eval_batch_size * self.args.world_size, self.evaluation_group)
        own: Any = self.eval_dataset
        known = list(own.values()) if isinstance(own, dict) else [own]
        return dataset if any(dataset is each for each in known) else self._sets(dataset, "eval")

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
        self.add_measured("eval", self._measured(rows, self.evaluation_group, 1 / self.args.world_size))
        own = min(self.own_rows(), len(inputs))
        experience = experience.take(torch.arange(max(own, 1)))
        batch: Any = self._prepare_inputs(self.micro_batch(experience))  # type: ignore[arg-type]
        found = self.outcome(model, batch)  # a process without a row of its own runs one for the collectives
        if own:
            self._sums["eval"].add_all(self.token_metrics(experience))
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

    def token_metrics(self, experience: Experience) -> dict[str, Weighted]:
        """What is logged of the tokens of this process's rows when they are generated."""
        return {}

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


def _total(terms: LossTerms) -> Tensor:
    return (where_counted(terms.values, terms.weights) * terms.weights).sum().detach()
