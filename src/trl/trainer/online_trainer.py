"""The base of the trainers that learn from their own rollouts: prompts, rollouts, rewards, advantages, objective."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from trl.data.prompts import PromptSets
from trl.data.rendering import text_tokenizer
from trl.data.streaming import RowStream
from trl.generation.engine import Engine, Sampling
from trl.generation.transformers.engine import TransformersEngine
from trl.generation.vllm.engine import PolicyCopy
from trl.methods.method import Scoring
from trl.methods.online import EQUAL_REWARDS, ROLLOUT, GroupMethod
from trl.models.reference import Reference
from trl.models.scoring.base import shares_prefix
from trl.models.scoring.causal import Scored
from trl.models.scoring.head import ScoreOptions
from trl.models.scoring.values import PolicyValueScorer
from trl.models.switches import undisturbed, without_ddp
from trl.options.groups import names_checked
from trl.options.training import config_or_default
from trl.reporting.run_lines import RunLines, print_sample
from trl.rewards.models import place_reward_models
from trl.rewards.source import RewardSources
from trl.rollouts.experience import (
    ADVANTAGE,
    MEAN_LENGTH,
    OLD,
    REF,
    REWARD,
    SAMPLING_LOGPS,
    STUDENT,
    TEACHER,
    VALUES,
    Experience,
    load_rollout_batch,
    save_rollout_batch,
)
from trl.rollouts.maker import Completer, Prompts, RolloutMaker, TextCompleter
from trl.rollouts.measures import of_all_processes, split_extremes
from trl.rollouts.refill import Refill
from trl.rollouts.rollout_func import RolloutFunction
from trl.rollouts.schedule import RolloutSizes, check_evaluation, step_rows
from trl.rollouts.token_counts import TokenCounts, sampled_tokens
from trl.tensors.reduce import LossTerms, Weighted
from trl.trainer import group_setup
from trl.trainer.base_trainer import BaseTrainer
from trl.trainer.group_images import PromptImages
from trl.trainer.grpo_config import GroupTraining, RolloutTraining
from trl.trainer.inherited import settle_inherited
from trl.trainer.online_parts import AnyDataset, RolloutFunc, online_parts
from trl.trainer.samples import ShownCompletions

logger = logging.getLogger(__name__)

_EVALUATION_SEED = 0x5EED  # evaluations draw other completions than training, and the same ones every time


class OnlineTrainer(BaseTrainer):
    """Base of the trainers that learn from rollouts of the policy itself.

    `make_rollout_batch` has the order of a rollout batch: `rollouts` draws prompts, completes them and scores the
    completions; the models score their tokens, and the method gives them advantages. `sizes.steps` optimiser steps then
    learn from it, each from the rows of `rows_of_step`. A checkpoint within these steps contains the rollout batch.

    A method that compares the completions of a prompt names its `GroupMethod` (rewards, advantages, loss terms) as
    `method_type`, and its `config_type`. A subclass may override `advantages(experience)` and `objective(experience,
    scored)`. Other methods (PPO) have a constructor of their own, which sets the attributes below and ends with
    `begin_rollouts`.
    """

    method_type: ClassVar[type[GroupMethod]]
    config_type: ClassVar[type[RolloutTraining]]
    args: RolloutTraining
    method: GroupMethod
    rollouts: RolloutMaker
    sizes: RolloutSizes
    reference: Reference | None = None
    images: PromptImages | None = None
    shares_prefix: bool = False
    reads_rounds = False  # rows that accelerate repeats are taken out by their number
    evaluation_group: int = 1  # completions of each evaluation prompt
    rows_at_once: int  # rows that are scored in one forward after a rollout
    _sets: PromptSets
    _rollout_batch: Experience | None = None
    _batch_number: int = -1

    @names_checked
    def __init__(
        self,
        model: str | nn.Module | PreTrainedModel,
        reward_funcs: Any | Sequence[Any] = None,
        args: RolloutTraining | None = None,
        train_dataset: AnyDataset | None = None,
        eval_dataset: AnyDataset | dict[str, AnyDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: Any | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any | None = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: RolloutFunc | None = None,
        teacher_model: str | nn.Module | PreTrainedModel | None = None,
        ref_model: Any = None,
        agent: Any = None,
        environment_factory: Any = None,
        completer: Completer | None = None,
    ) -> None:
        args = config_or_default(args, self.config_type, self._tag_names[-1])
        settle_inherited(args, "rollouts")
        parts = online_parts(
            args, self.method_type, model,
            processing_class=processing_class, peft_config=peft_config,
            train_dataset=train_dataset, eval_dataset=eval_dataset,
            reward_funcs=reward_funcs, reward_processing_classes=reward_processing_classes,
            tools=tools, rollout_func=rollout_func, teacher_model=teacher_model, ref_model=ref_model,
            agent=agent, environment_factory=environment_factory, completer=completer,
        )  # fmt: skip
        policy, self._sets = parts.policy, parts.sets
        self.scorer, self._tokenizer = policy.scorer, policy.tokenizer
        self.shares_prefix = shares_prefix(policy.scorer, args.prefix_sharing)
        self.method, self.sizes, self.rows_at_once = parts.method, parts.sizes, args.device_rows
        self.evaluation_group = args.num_generations_eval or self.sizes.group
        self.images = getattr(parts.sets, "images", None)
        self.reference, self.teacher = parts.reference, parts.teacher
        self._shown, self._token_counts = (
            ShownCompletions(),
            TokenCounts(masks_truncated=args.mask_truncated_completions),
        )
        rows: Any = parts.train_dataset
        super().__init__(
            model=policy.model, args=args, data_collator=list, train_dataset=rows, eval_dataset=parts.eval_dataset,
            processing_class=policy.processing_class, callbacks=callbacks, optimizers=optimizers,
        )  # fmt: skip
        engine = self.rollout_engine(parts.engine(args, self.model, self.accelerator))
        completer = parts.completer
        if rollout_func is not None:
            limits = {"context_length": parts.sets.context_length, "vocabulary": parts.sets.settings.vocabulary}
            completer = RolloutFunction(rollout_func, self, **limits)
        self.begin_rollouts(
            engine, parts.sampling, parts.rewards, shuffle=bool(args.shuffle_dataset), completer=completer
        )
        self.settle_reference()
        if self.teacher is not None and self.reference is not getattr(self.teacher, "reference", self):
            self.teacher.prepare(self.accelerator)

    def begin_rollouts(
        self,
        engine: Engine,
        sampling: Sampling,
        rewards: RewardSources,
        *,
        shuffle: bool = True,
        completer: Completer | None = None,
    ) -> None:
        """Make `rollouts`, at the end of the constructor.

        Raises: ValueError for a reward function with an argument that no column gives.
        """
        rows: Any = self.train_dataset
        assert isinstance(rows, (Dataset, RowStream))
        refill = None
        if isinstance(self.args, GroupTraining) and self.args.dynamic_sampling:
            refill = Refill(
                self.args.max_resampling_rounds,
                lacks_variance=partial(self.method.lacks_variance, group_size=self.sizes.group),
                discard=partial(self._count_sampled, is_discarded=True),
            )
        self.rollouts = RolloutMaker(
            Prompts(rows, self.sizes.prompts, self.order_seed, shuffle),
            self.sizes,
            engine=engine,
            sampling=sampling,
            rewards=rewards,
            apply_rewards=self.method.apply_rewards,
            tokenizer=text_tokenizer(self.processing_class),  # type: ignore[arg-type]
            accelerator=self.accelerator,
            completer=completer,
            refill=refill,
            parts=getattr(self.args, "generation_parts", 1),
        )
        if getattr(completer, "adds", ()) is not None:
            given: Any = self.eval_dataset
            later = list(given.values()) if isinstance(given, dict) else [given] if given is not None else []
            for each in (rows, *later):
                columns = self.rollouts.prompts.reward_columns
                added = [*getattr(completer, "reward_names", ()), *getattr(completer, "adds", ())]
                rewards.check_columns([*(name for name in columns if name in each.column_names), *added])
        place_reward_models(rewards.models, self.accelerator)

    # ---- the hooks of a method

    def rollout_engine(self, engine: Engine) -> Engine:
        """The engine of rollouts, made of the config's."""
        return engine

    def advantages(self, experience: Experience, *, group_size: int | None = None) -> Experience:
        """Add the columns that the objective needs; called with the whole rollout batch of this process.

        They are rewards and advantages in groups over all processes, the mean length, and corrections of the sampler's
        mismatch. `group_size` is set in evaluations.
        """
        experience = self.method.with_penalties(experience)
        rows = self._rows_of_all(experience, is_evaluation=group_size is not None)
        rewards, advantages = self.method.rewards_and_advantages(rows, group_size or self.sizes.group)
        count = len(experience)
        first = self.args.process_index * count
        own = torch.arange(first, first + count).clamp(max=len(rewards) - 1)
        length = self.method.mean_length(rows).expand(count).clone()
        columns = {REWARD: rewards[own], ADVANTAGE: advantages[own], MEAN_LENGTH: length}
        experience = self.method.with_teacher(experience.with_rows(**columns))
        counted = torch.arange(count) < (count if group_size is None else self.own_rows())
        found = self.method.corrected(experience, is_exact=self.sampler_is_exact, counted=counted)
        if found is None:
            return experience
        sums = self._sums["train" if group_size is None else "eval"]
        sums.add(found.means)
        sums.add_extremes(found.extremes)
        return found.experience

    def own_rows(self) -> int:
        """The rows of the current evaluation batch that accelerate did not repeat to fill it."""
        state, rows = self.accelerator.gradient_state, self.args.eval_batch_size
        if self.args.world_size == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return rows
        return min(max(state.remainder - self.args.process_index * rows, 0), rows)

    def _rows_of_all(self, experience: Experience, *, is_evaluation: bool) -> dict[str, Tensor]:
        """The columns per row of all processes, without rows that accelerate repeats to fill a batch."""
        rows, state = of_all_processes(experience, self.accelerator), self.accelerator.gradient_state
        if not (is_evaluation and self.args.world_size > 1 and state.end_of_dataloader and state.remainder > 0):
            return rows
        return {name: column[: state.remainder] for name, column in rows.items()}

    def objective(self, experience: Experience, scored: Scored) -> Sequence[LossTerms]:
        """The terms of a micro-batch's loss."""
        return self.method.objective(experience, scored, self.scoring().step)

    def scoring(self, model: nn.Module | None = None, batch: Mapping[str, Any] = {}, **given: Any) -> Scoring:
        """With the temperature of the log-probs that are learned, and an overridden `objective`."""
        is_ours = getattr(self.objective, "__func__", None) is OnlineTrainer.objective
        objective = None if is_ours else self.objective
        is_first = self.mode == "train" and self.state.global_step % self.sizes.steps == 0
        given |= {"objective": objective, "is_first": is_first, "is_exact": self.sampler_is_exact}
        return replace(super().scoring(model, batch, **given), temperature=self.scoring_temperature)

    def rollout_metrics(self, experience: Experience, *, share: float) -> dict[str, Weighted]:
        """The metrics of a rollout batch, or of completions of an evaluation, of which these rows are a `share`."""
        found = self.method.token_metrics(experience)
        rows = self._rows_of_all(experience, is_evaluation=False)
        found |= self.method.metrics(rows, self.rollouts.rewards.names, self.sizes.group, share=share)
        if self._token_counts is not None and EQUAL_REWARDS in found and found[EQUAL_REWARDS].mean == 1:
            self._token_counts.warn_only_kl_differs(self.args.beta, metric=EQUAL_REWARDS)  # type: ignore[attr-defined]
        return found

    # ---- a rollout batch

    def make_rollout_batch(self, number: int) -> Experience:
        """Rollout batch `number` of this run: completions by the current policy, with scores and advantages.

        Its metrics are recorded, and its tokens counted once, however often they are learned from.
        """
        self.rollouts.follow(self.model_wrapped, self.state)
        if (journal := self._journal) is not None:
            journal.begin(self.state.global_step, self.model_wrapped, run=self._run_name)
        made = self.rollouts.make(number)
        if number == 0:
            self._sample = made.prompts.split()[0].tolist(), made.completions.split()[0].tolist()
        if journal is not None:
            journal.end()
        experience = self.advantages(self.scored(made, learning=True))
        if self.rollouts.refill is not None:
            self._sums["train"].add(self.rollouts.refill.measured)
        if self._token_counts is not None:
            self._token_counts.warn_untrained(self._count_sampled(experience))
            if self.args.log_completions:
                advantages = experience.per_row[ADVANTAGE]
                self._shown.gather(experience, self.rollouts.texts, self.rollouts.rewards.names, advantages=advantages)
        self._record_rollouts(experience)
        return experience

    @property
    def _journal(self) -> Any:
        """Of the sessions of agents."""
        return getattr(self.rollouts.completer, "journal", None)

    @property
    def _run_name(self) -> str | None:
        return None if self.runs.current is None else self.runs.current.facts["run"]

    def _record_rollouts(self, experience: Experience) -> None:
        self._sums["train"].add(self.rollout_metrics(experience, share=1 / self.args.world_size))

    def _count_sampled(self, experience: Experience, *, is_discarded: bool = False) -> dict[str, int]:
        """Count the tokens of this process's rows, which are learned from or discarded; all processes must call it.

        Returns how many completion tokens of all processes went where.
        """
        assert self._token_counts is not None
        self.run_metrics.count_tokens(sampled_tokens(experience))
        empty = torch.zeros(len(experience.completions.values))
        signals = empty if is_discarded else self.method.signals(experience)
        return self._token_counts.add(experience, self.accelerator, signals)

    def scored(self, experience: Experience, *, learning: bool) -> Experience:
        """Add the log-probs and values of completion tokens that the method needs, `rows_at_once` rows at a time."""
        is_exact, known = self.sampler_is_exact, experience.per_token
        if is_exact:
            experience = experience.with_tokens(**{OLD: known[SAMPLING_LOGPS]})
        wanted = {
            REF: self.reference is not None and self.method.scores_reference,
            OLD: not is_exact and (self.sizes.steps > 1 or self.method.needs_old(experience)),
            TEACHER: self.method.scores_teacher,
            STUDENT: self.method.scores_teacher and self._teacher_temperature != self.rollouts.sampling.temperature,
            VALUES: learning and self.method.needs_values,
        }
        columns = [name for name, is_wanted in wanted.items() if is_wanted and name not in known]
        if not columns:
            return experience
        parts: list[dict[str, Tensor]] = []
        with torch.no_grad(), undisturbed(self.model_wrapped):  # type: ignore[arg-type]
            for rows in torch.arange(len(experience)).split(self.rows_at_once):
                batch: Any = self._prepare_inputs(self.batch_of(experience.take(rows)))  # type: ignore[arg-type]
                parts.append(self.score_rollout(batch, columns))
        found = {name: torch.cat([part[name].cpu() for part in parts]) for name in parts[0]}
        return experience.with_tokens(**found)

    def score_rollout(self, batch: dict[str, Any], columns: Sequence[str]) -> dict[str, Tensor]:
        """Columns `(K,)` of the completion tokens: `old_logps`, `values`, `ref_logps`, `teacher_logps`."""
        found = dict[str, Tensor]()
        own, teachers = (
            ScoreOptions(temperature=each) for each in (self.scoring_temperature, self._teacher_temperature)
        )
        policy: Any = without_ddp(self.model_wrapped)  # type: ignore[arg-type]
        scored_by = {REF: (self.reference, own), TEACHER: (getattr(self.teacher, "reference", None), teachers)}
        with self.accelerator.autocast():
            if OLD in columns:
                scored = self.scorer.score(policy, batch, own)
                found = {OLD: scored.logps}
                if scored.values is not None:
                    found[VALUES] = scored.values
            elif VALUES in columns:
                assert isinstance(self.scorer, PolicyValueScorer)
                found[VALUES] = self.scorer.score_values(policy, batch)
            for name, (model, options) in scored_by.items():
                if name in columns:
                    found[name] = model.score(self.model_wrapped, batch, partial(_logps, options=options))
            if STUDENT in columns:
                found[STUDENT] = self.scorer.score(policy, batch, teachers).logps
        return found

    @property
    def _teacher_temperature(self) -> float:
        return self.method.teacher_temperature or self.rollouts.sampling.temperature

    @property
    def sampler_is_exact(self) -> bool:
        """Whether the sampler's log-probs are those of the scoring forward, up to rounding.

        They are not in lower precision, with truncated distributions, and for models whose rotary angles depend on the
        length (the cache holds keys of shorter rows).
        """
        wide = all(part.dtype in (torch.float32, torch.float64) for part in self.scorer.core.parameters())
        plain = self.accelerator.mixed_precision == "no" and not self.scorer.stretched_rotaries
        return self.rollouts.exact and wide and plain

    @property
    def scoring_temperature(self) -> float:
        """Of the log-probs that are learned: the one that completions are sampled at."""
        return self.rollouts.sampling.temperature

    # ---- the steps of a rollout batch

    def get_train_dataloader(self) -> DataLoader:
        """One number for each micro-batch of an epoch; the step determines its prompts.

        The epoch of a stream is the whole run.
        """
        rows = self.rollouts.prompts.rows
        if isinstance(rows, RowStream):
            steps = self.args.max_steps
        else:
            steps = max(1, round(len(rows) / self.sizes.prompts)) * self.sizes.steps
        turns: Any = range(steps * self.sizes.micro_batches)
        return DataLoader(turns, batch_size=1, generator=torch.Generator())

    def num_examples(self, dataloader: DataLoader) -> int:
        """The number of completions in an epoch."""
        if not isinstance(dataloader.dataset, range):
            return super().num_examples(dataloader)
        return len(dataloader.dataset) * self.args.train_batch_size * self.args.world_size

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """The micro-batches of one optimiser step and their count; the first step of a rollout batch makes it."""
        self._step_started, self._turns = time.monotonic(), 0
        turns = [turn for _, turn in zip(range(num_batches), epoch_iterator, strict=False)]
        if not turns:
            return [], None
        if self.runs.current is not None:  # before a rollout, where transformers would do it after
            self._load_rng_state(self.runs.current.checkpoint)
        number, step = divmod(self.state.global_step, self.sizes.steps)
        if self._rollout_batch is None or self._batch_number != number:
            self._rollout_batch, self._batch_number = self.make_rollout_batch(number), number
        elif self.method.repeats_metrics:
            self._record_rollouts(self._rollout_batch)
        rows = self.rows_of_step(step)
        batches = [self.micro_batch(self._rollout_batch.take(own)) for own in rows[: len(turns)]]
        return super().get_batch_samples(iter(batches), len(batches), device)

    _step_started, _turns = 0.0, 0

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """One micro-batch, forward and backward; the last of a step records how long the step took."""
        loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[arg-type]
        self._turns += 1
        if self._turns == self.sizes.micro_batches and self._token_counts is not None:
            seconds = torch.tensor(time.monotonic() - self._step_started)
            self._sums["train"].add({"step_time": Weighted(seconds, torch.ones(()))})
        return loss

    def rows_of_step(self, step: int, sizes: RolloutSizes | None = None) -> list[Tensor]:
        """This process's rows of the rollout batch for each micro-batch of one of its optimiser steps."""
        place = {"batch": self._batch_number, "process": self.args.process_index}
        return step_rows(step, sizes or self.sizes, seed=self.order_seed, **place)

    def micro_batch(self, experience: Experience) -> dict[str, Any]:
        """The input of `compute_loss`: a batch of some rows, and the rows."""
        return {**self.batch_of(experience), ROLLOUT: experience}

    def _prepare_inputs(self, inputs: Any) -> Any:
        """A batch and its rows on the device."""
        inputs = super()._prepare_inputs(inputs)
        if isinstance(inputs, dict) and ROLLOUT in inputs:
            inputs[ROLLOUT] = inputs[ROLLOUT].to(self.args.device)
        return inputs

    def batch_of(self, experience: Experience) -> dict[str, Any]:
        """The models' inputs for some rows; the scored tokens are those of the completions, in order."""
        if self.images is not None:
            return self.images.batch(experience)
        return experience.as_batch(prefix_sharing=self.shares_prefix)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; with a training loss also token counts and, with `log_completions`, completions."""
        counts = self._token_counts if self.ends_window(logs) else None
        super().log(logs if counts is None else {**logs, **counts.logged()}, start_time)
        if counts is not None and self.args.log_completions:
            self._shown.show(self)

    # ---- evaluation

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Batches of numbered rows of prompts."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):
            chosen = self.eval_dataset[chosen]  # type: ignore[index]
        if chosen is None:
            raise ValueError("evaluation needs an eval_dataset, got None. Pass it to the trainer or to evaluate.")
        processes = 1 if self.method.pairs_rows else self.args.world_size
        check_evaluation(self.args.eval_batch_size * processes, self.evaluation_group)
        own: Any = self.eval_dataset
        known = list(own.values()) if isinstance(own, dict) else [own]
        if not any(chosen is each for each in known):  # given to evaluate
            chosen = self._sets(group_setup.environment_rows(self.rollouts.completer, chosen), "eval")
        loader = DataLoader(
            _Numbered(chosen, self.evaluation_group),  # type: ignore[arg-type]
            batch_size=self.args.eval_batch_size,
            collate_fn=list,
        )
        return self.accelerator.prepare(loader)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """`get_eval_dataloader` for the rows of `predict`."""
        return self.get_eval_dataloader(test_dataset)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; see `BaseTrainer.evaluation_loop`. Environments are closed after it, unless training continues."""
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            if not self.is_in_train:
                self._close_environments()

    @torch.no_grad()
    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Complete a batch of prompts, judge it as in training, and record its metrics and its loss."""
        experience = self.advantages(self.evaluation_rollout(inputs), group_size=self.evaluation_group)
        rows, share = self._rows_of_all(experience, is_evaluation=True), 1 / self.args.world_size
        measured = self.method.metrics(rows, self.rollouts.rewards.names, self.evaluation_group, share=share)
        means, extremes = split_extremes(measured)
        self._sums["eval"].add(means)
        self._sums["eval"].add_extremes(extremes)
        own = min(self.own_rows(), len(inputs))
        # A process without a row of its own runs a group for the collectives; a method may compare its rows.
        experience = experience.take(torch.arange(own or min(self.evaluation_group, len(inputs))))
        batch: Any = self._prepare_inputs(self.micro_batch(experience))  # type: ignore[arg-type]
        found = self.outcome(model, batch)
        if own:
            self._sums["eval"].add(self.method.token_metrics(experience))
            self._record(found, self.method.count(batch))
        return None, None, None

    def evaluation_rollout(self, inputs: Sequence[Mapping[str, Any]]) -> Experience:
        """Completions of numbered rows of prompts, with their scores and their tokens' log-probs."""
        columns = {name: [row[name] for row in inputs] for name in inputs[0]}
        streams = [_EVALUATION_SEED * 2**32 + row for row in columns.pop("row")]
        self.rollouts.follow(self.model_wrapped, self.state)
        return self.scored(self.rollouts.roll_out(columns, streams=streams, training=False), learning=False)

    # ---- checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; see `transformers.Trainer.train`. Resuming is bit-exact, within a rollout batch too.

        Token counts start at 0.
        """
        beta = self.args.beta if isinstance(self.args, GroupTraining) else 0
        if beta and self.reference is None:
            raise ValueError(
                f"beta={beta} needs a reference policy, and the trainer was built with beta=0. Set beta in the config "
                "before the trainer is built."
            )
        self._rollout_batch, self._batch_number = None, -1
        if self._token_counts is not None:
            self._token_counts.load_state({})
        self._sample = None
        try:
            result = super().train(resume_from_checkpoint, *args, **kwargs)
            try:
                self._show_sample()
            except Exception as error:  # of a run that is done
                logger.warning("The sample answer after training failed: %s", error)
            return result
        finally:
            self._close_environments()

    _sample: tuple[list[int], list[int]] | None = None

    def _show_sample(self) -> None:
        """Print the first prompt of a finished run, its first completion, and the policy's greedy one after all steps.

        Only below the table of `RunLines`, for text of the policy itself: a copy would need its weights again.
        """
        engine, model = getattr(self.rollouts.engine, "policy", self.rollouts.engine), self.model_wrapped
        assert model is not None
        has_table = any(isinstance(each, RunLines) for each in self.callback_handler.callbacks)
        is_text = type(engine) is TransformersEngine and isinstance(self.rollouts.completer, TextCompleter)
        if self._sample is None or not (has_table and is_text) or self.state.global_step < self.state.max_steps:
            return
        prompt, before = self._sample
        # Every process completes its own prompt, as sharded weights need all of them.
        with undisturbed(model), self.accelerator.autocast():
            engine.sync_weights(model, self.state.global_step)
            after = engine.generate([prompt], replace(self.rollouts.sampling, temperature=0.0), streams=[0])[0].ids
        if self.is_world_process_zero():
            texts = text_tokenizer(self.processing_class).batch_decode(  # type: ignore[union-attr,arg-type]
                [prompt, before, after], skip_special_tokens=True
            )
            print_sample(*texts)

    def _close_environments(self) -> None:
        if (close := getattr(self.rollouts.completer, "close", None)) is not None:
            close()

    def save_progress(self, folder: Path) -> None:
        """Write into a checkpoint also the rollout batch that the run is in."""
        super().save_progress(folder)
        if self._journal is not None:
            first = self.state.global_step - self.state.global_step % self.sizes.steps
            self._journal.prune(first, run=self._run_name)
        if self._rollout_batch is not None and self.state.global_step % self.sizes.steps:
            place = {"rank": self.args.process_index, "facts": _rollout_facts(self)}
            save_rollout_batch(folder, self._rollout_batch, **place)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        _forget_copy(self.rollouts.engine)

    def load_progress(self, folder: Path) -> None:
        """Load what `save_progress` wrote, when training begins."""
        super().load_progress(folder)
        _forget_copy(self.rollouts.engine)  # the weights have just been loaded too
        if not self.state.global_step % self.sizes.steps:
            return
        place = {"rank": self.args.process_index, "processes": self.args.world_size}
        if not self.runs.starts_anew("progress"):
            self._rollout_batch = load_rollout_batch(folder, facts=_rollout_facts(self), **place)
        self._batch_number = self.state.global_step // self.sizes.steps
        if self._rollout_batch is None:
            logger.warning(
                "%s holds no rollouts that fit this run's batch size and steps. They are sampled again by the checkpoint's policy, "
                "so the run differs from one that was not stopped. Resume with the settings it was saved with.",
                folder,
            )


def _rollout_facts(trainer: OnlineTrainer) -> dict[str, Any]:
    """The identity of the rollout batch that a run is in."""
    sizes, number = trainer.sizes, trainer.state.global_step // trainer.sizes.steps
    return {"window": number, "rows": sizes.rows, "steps": sizes.steps, "seed": trainer.order_seed}


def _logps(scorer: Any, model: nn.Module, batch: Any, *, options: ScoreOptions) -> Tensor:
    """Log-probs of the scored tokens, in order."""
    return scorer.score(model, batch, options).logps


def _forget_copy(engine: Engine) -> None:
    """Make an engine with a copy of the policy load it again."""
    if isinstance(engine, PolicyCopy):
        engine.forget()


class _Numbered(torch.utils.data.Dataset):
    """Rows of a data set, each several times in turn, with their numbers in a column `row`."""

    def __init__(self, dataset: Dataset, copies: int) -> None:
        self.dataset, self.copies = dataset, copies

    def __len__(self) -> int:
        return len(self.dataset) * self.copies

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.dataset[index // self.copies], "row": index}
