"""The base of the trainers that learn from their own rollouts: prompts, rollouts, rewards, advantages, objective."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from trl.agents.completer import Agent
from trl.data.formats import by_name
from trl.data.prompts import PromptSets
from trl.data.rendering import text_tokenizer
from trl.data.streaming import RowStream
from trl.generation.engine import Engine, Sampling
from trl.methods.method import Scoring
from trl.methods.online import GroupMethod
from trl.models.packed.layout import ROLLOUT, Inputs
from trl.models.peft import AdapterConfig
from trl.models.reference import Reference
from trl.models.scoring.base import shares_prefix
from trl.models.scoring.causal import Scored
from trl.models.switches import undisturbed
from trl.options.groups import names_checked
from trl.options.training import config_or_default
from trl.rewards.models import place_reward_models
from trl.rewards.source import ProcessingClasses, RewardSources
from trl.rollouts.experience import ADVANTAGE, MEAN_LENGTH, REWARD, Experience, load_rollout_batch, save_rollout_batch
from trl.rollouts.maker import Completer, NumberedRows, Prompts, RolloutMaker
from trl.rollouts.measures import local_rows, of_all_processes, shared, split_extremes
from trl.rollouts.refill import Refill
from trl.rollouts.rollout_func import RolloutFunction
from trl.rollouts.schedule import RolloutSizes, check_evaluation, step_rows
from trl.rollouts.token_counts import TokenCounts
from trl.tensors.reduce import LossTerms, Weighted
from trl.trainer import group_setup
from trl.trainer.arguments import AnyDataset, AnyModel, EvalDatasets, Optimizers, Processor
from trl.trainer.base_trainer import BaseTrainer
from trl.trainer.callbacks.sync_ref_model import move_reference
from trl.trainer.group_images import PromptImages
from trl.trainer.group_setup import Environments, RewardFuncs, RolloutFunc, Tools
from trl.trainer.grpo_config import GroupTraining, RolloutTraining
from trl.trainer.inherited import settle_inherited
from trl.trainer.kept_completions import KeptCompletions
from trl.trainer.loaders import loader_of_places, on_device, order_seed
from trl.trainer.online_parts import columns_to_score, online_parts, rows_of_group, score_rows
from trl.trainer.run_metrics import ends_window
from trl.trainer.samples import show_sample

logger = logging.getLogger(__name__)


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
    batch_of: Callable[[Experience], Inputs]
    """The models' inputs for some rows; the scored tokens are those of the completions, in order."""
    shares_tokens: ClassVar[bool] = True
    reads_rounds = False  # rows that accelerate repeats are taken out by their number
    evaluation_group: int = 1  # completions of each evaluation prompt
    rows_at_once: int  # rows that are scored in one forward after a rollout
    _sets: PromptSets
    _rollout_batch: Experience | None = None  # completions of this process
    _learned: Experience | None = None  # and of those that score the same batches
    _batch_number: int = -1
    _sample: tuple[list[int], list[int]] | None = None  # the first prompt of a run, and its first completion
    _step_started = 0.0

    @names_checked
    def __init__(
        self, model: AnyModel, reward_funcs: RewardFuncs = None, args: RolloutTraining | None = None,
        train_dataset: AnyDataset | None = None, eval_dataset: EvalDatasets | None = None,
        processing_class: Processor | None = None,
        reward_processing_classes: ProcessingClasses = None, callbacks: list[TrainerCallback] | None = None,
        optimizers: Optimizers = (None, None), peft_config: AdapterConfig = None, tools: Tools | None = None,
        rollout_func: RolloutFunc | None = None, teacher_model: AnyModel | None = None,
        ref_model: AnyModel | None = None, agent: Agent | None = None,
        environment_factory: Environments | None = None, completer: Completer | None = None,
    ) -> None:  # fmt: skip
        args = config_or_default(args, self.config_type, self._tag_names[-1])
        settle_inherited(args, "rollouts")
        parts = online_parts(
            args, self.method_type, model,
            processing_class=processing_class, peft_config=peft_config,
            train_dataset=train_dataset, eval_dataset=eval_dataset,
            reward_funcs=reward_funcs, reward_processing_classes=reward_processing_classes,
            tools=tools, rollout_func=rollout_func, teacher_model=teacher_model, ref_model=ref_model,
            agent=agent, environment_factory=environment_factory, completer=completer, shares_tokens=self.shares_tokens,
        )  # fmt: skip
        policy, self._sets = parts.policy, parts.sets
        self.scorer, self._tokenizer = policy.scorer, policy.tokenizer
        self.method, self.sizes, self.rows_at_once = parts.method, parts.sizes, args.device_rows
        self.evaluation_group = args.num_generations_eval or self.sizes.group
        self.images = getattr(parts.sets, "images", None)
        without_images = partial(Experience.as_batch, prefix_sharing=shares_prefix(policy.scorer, args.prefix_sharing))
        self.batch_of = without_images if self.images is None else self.images.batch
        self.reference, self.teacher = parts.reference, parts.teacher
        super().__init__(
            model=policy.model, args=args, data_collator=list, train_dataset=parts.train_dataset,
            eval_dataset=parts.eval_dataset, processing_class=policy.processing_class, callbacks=callbacks,
            optimizers=optimizers,
        )  # fmt: skip
        self._token_counts = TokenCounts(
            self.accelerator, lambda count: self.run_metrics.count_tokens(count * args.sp_size),
            masks_truncated=args.mask_truncated_completions,
        )  # fmt: skip
        engine, completer = self.rollout_engine(parts.engine(args, self.model, self.accelerator)), parts.completer
        if rollout_func is not None:
            limits = {"context_length": parts.sets.context_length, "vocabulary": parts.sets.settings.vocabulary}
            completer = RolloutFunction(rollout_func, self, **limits)
        shuffle = bool(args.shuffle_dataset)
        self.begin_rollouts(engine, parts.sampling, parts.rewards, shuffle=shuffle, completer=completer)
        self._moved_reference = move_reference(self)
        if self.teacher is not None and self.reference is not getattr(self.teacher, "reference", self):
            self.teacher.prepare(self.accelerator)

    def begin_rollouts(
        self, engine: Engine, sampling: Sampling, rewards: RewardSources, *, shuffle: bool = True,
        completer: Completer | None = None,
    ) -> None:  # fmt: skip
        """Make `rollouts`, at the end of the constructor.

        Raises: ValueError for a reward function with an argument that no column gives.
        """
        rows = self.train_dataset
        assert isinstance(rows, (Dataset, RowStream))
        refill = None
        if isinstance(self.args, GroupTraining) and self.args.dynamic_sampling:
            assert self._token_counts is not None
            lacks_variance = partial(self.method.lacks_variance, group_size=self.sizes.group)
            limit, discard = self.args.max_resampling_rounds, self._token_counts.discard
            refill = Refill(limit, lacks_variance=lacks_variance, discard=discard)
        self._completions = KeptCompletions()
        self.rollouts = RolloutMaker(
            Prompts(rows, self.sizes.prompts, order_seed(self.args), shuffle), self.sizes, engine=engine,
            sampling=sampling, rewards=rewards, apply_rewards=self.method.apply_rewards, accelerator=self.accelerator,
            tokenizer=text_tokenizer(self.processing_class),  # type: ignore[arg-type]
            completer=completer, refill=refill, parts=getattr(self.args, "generation_parts", 1),
        )  # fmt: skip
        self.rollouts.check_columns(rows, *by_name(self.eval_dataset).values())
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
        is_evaluation = group_size is not None
        experience = self.method.with_penalties(experience)
        rows = of_all_processes(experience, self.accelerator, is_evaluation=is_evaluation)
        rewards, advantages = self.method.rewards_and_advantages(rows, group_size or self.sizes.group)
        count = len(experience)
        local = (self.args.process_index * count + torch.arange(count)).clamp(max=len(rewards) - 1)
        length = self.method.mean_length(rows).expand(count).clone()
        columns = {REWARD: rewards[local], ADVANTAGE: advantages[local], MEAN_LENGTH: length}
        experience = experience.with_rows(**columns)
        if self.method.scores_teacher:
            experience = self.method.with_teacher(experience)
        read = local_rows(self.accelerator, self.args.eval_batch_size) if is_evaluation else count
        counted = torch.arange(count) < read
        corrected = self.method.corrected(experience, is_exact=self.sampler_is_exact, counted=counted)
        if corrected is None:
            return experience
        self._sums["eval" if is_evaluation else "train"].add(corrected.means, corrected.extremes)
        return corrected.experience

    def objective(self, experience: Experience, scored: Scored) -> Sequence[LossTerms]:
        """The terms of a micro-batch's loss."""
        return self.method.objective(experience, scored, self.scoring().step)

    def scoring(self, model: nn.Module | None = None, batch: Mapping[str, Any] = {}, **of_step: Any) -> Scoring:
        """With the temperature of the log-probs that are learned, and an overridden `objective`."""
        objective = None if getattr(self.objective, "__func__", None) is OnlineTrainer.objective else self.objective
        is_first = self.mode == "train" and self.state.global_step % self.sizes.steps == 0
        of_step |= {"objective": objective, "is_first": is_first, "keep_entropies": self._completions.keep_entropies}
        scoring = super().scoring(model, batch, **of_step)
        return replace(scoring, temperature=self.method.temperature or self.rollouts.sampling.temperature)

    def rollout_metrics(self, experience: Experience, *, share: float) -> dict[str, Weighted]:
        """The metrics of a rollout batch, or of completions of an evaluation, of which these rows are a `share`."""
        metrics = shared(self.method.token_metrics(experience), self.args.sp_size)  # as often as those of micro-batches
        rows = of_all_processes(experience, self.accelerator)
        return metrics | shared(self.method.metrics(rows, self.rollouts.rewards.names, self.sizes.group), share)

    # ---- a rollout batch

    def make_rollout_batch(self, number: int) -> Experience:
        """Rollout batch `number` of this run: completions by the current policy, with scores and advantages.

        Its metrics are recorded, and its tokens counted once, however often they are learned from.
        """
        self.rollouts.follow(self.model_wrapped, self.state)
        step, journal = self.state.global_step, getattr(self.rollouts.completer, "journal", None)
        with nullcontext() if journal is None else journal.writing(step, self.model_wrapped, run=self.runs.name):
            rows = self.rollouts.make(number)
        if number == 0:
            self._sample = rows.prompts.split()[0].tolist(), rows.completions.split()[0].tolist()
        experience, refill = self.advantages(self.scored(rows, learning=True)), self.rollouts.refill
        if refill is not None:
            self._sums["train"].add(refill.measured)
        if self._token_counts is not None:
            added = self._token_counts.add(experience, self.method.signals(experience))
            self._token_counts.warn_untrained(added)
        self._completions.keep(experience, self.rollouts.texts, self.rollouts.rewards.names)
        self._sums["train"].add(self.rollout_metrics(experience, share=1 / self.args.world_size))
        return experience

    def scored(self, experience: Experience, *, learning: bool) -> Experience:
        """Add the log-probs and values of completion tokens that the method needs, `rows_at_once` rows at a time."""
        experience, names = columns_to_score(
            experience, self.method, is_exact=self.sampler_is_exact, is_reused=self.sizes.steps > 1, learning=learning,
            has_reference=self.reference is not None, temperature=self.rollouts.sampling.temperature,
        )  # fmt: skip
        if not names:
            return experience
        parts, (every, local) = list[dict[str, Tensor]](), rows_of_group(self.scorer.group, experience)
        with torch.no_grad(), undisturbed(self.model_wrapped):  # type: ignore[arg-type]
            for rows in torch.arange(len(every)).split(self.rows_at_once):
                batch = on_device(self, self.batch_of(every.take(rows)))
                parts.append(self.score_rollout(batch, names))
        return experience.with_tokens(**{name: torch.cat([x[name].cpu() for x in parts])[local] for name in parts[0]})

    def score_rollout(self, batch: Inputs, columns: Sequence[str]) -> dict[str, Tensor]:
        """Columns `(K,)` of the completion tokens: `old_logps`, `values`, `ref_logps`, `teacher_logps`."""
        of_teacher = self.method.teacher_temperature or self.rollouts.sampling.temperature
        return score_rows(self.scoring(), batch, columns, reference=self.reference, of_teacher=of_teacher)

    @property
    def sampler_is_exact(self) -> bool:
        """Whether the sampler's log-probs are those of the scoring forward, up to rounding.

        They are not in lower precision, with truncated distributions, and for models whose rotary angles depend on the
        length (the cache holds keys of shorter rows).
        """
        maker = self.rollouts
        is_sampled = maker.completer.exact and maker.engine.exact and not maker.sampling.alters_distribution
        wide = all(part.dtype in (torch.float32, torch.float64) for part in self.scorer.core.parameters())
        plain = self.accelerator.mixed_precision == "no" and not self.scorer.stretched_rotaries
        return is_sampled and wide and plain

    # ---- the steps of a rollout batch

    def get_train_dataloader(self) -> DataLoader:
        """The places of each micro-batch's completions in an epoch; the step determines their prompts."""
        return loader_of_places(self.rollouts.prompts.rows, self.sizes, self.args)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """The micro-batches of one optimiser step and their count; the first step of a rollout batch makes it."""
        self._step_started = time.monotonic()
        turns = [turn for _, turn in zip(range(num_batches), epoch_iterator, strict=False)]
        if not turns:
            return [], None
        if self.runs.random_state_is_due and self.runs.current:
            # Before a rollout, where transformers would do it after.
            self._load_rng_state(self.runs.current.checkpoint)
        number, step = divmod(self.state.global_step, self.sizes.steps)
        if self._rollout_batch is None or self._batch_number != number:
            self._rollout_batch, self._learned, self._batch_number = self.make_rollout_batch(number), None, number
        elif self.method.repeats_metrics:
            self._sums["train"].add(self.rollout_metrics(self._rollout_batch, share=1 / self.args.world_size))
        if self._learned is None:
            self._learned, _ = rows_of_group(self.scorer.group, self._rollout_batch)
        batches = [self.micro_batch(self._learned.take(part)) for part in self.rows_of_step(step)[: len(turns)]]
        return super().get_batch_samples(iter(batches), len(batches), device)

    def training_step(self, model: nn.Module, inputs: Inputs, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """One micro-batch, forward and backward; the last of a step records how long the step took."""
        loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[arg-type]
        if self._turns == self.sizes.micro_batches and self._token_counts is not None:
            seconds = torch.tensor(time.monotonic() - self._step_started)
            self._sums["train"].add({"step_time": Weighted(seconds, torch.ones(()))})
        return loss

    def micro_batch_number(self, turn: int) -> int:
        """Each process has neighbouring rows of a step."""
        return self.args.data_index * self.sizes.micro_batches + turn

    def rows_of_step(self, step: int, sizes: RolloutSizes | None = None) -> list[Tensor]:
        """The `_learned` rows of the rollout batch for each micro-batch of one of its optimiser steps."""
        sizes = replace(sizes or self.sizes, processes=self.args.data_processes)
        seed = self.rollouts.prompts.seed
        return step_rows(step, sizes, batch=self._batch_number, process=self.args.data_index, seed=seed)

    def micro_batch(self, experience: Experience) -> Inputs:
        """The input of `compute_loss`: a batch of some rows, and the rows."""
        return {**self.batch_of(experience), ROLLOUT: experience}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; with a training loss also token counts, and completions, which `log_completions` shows."""
        counts = self._token_counts if ends_window(logs, self) else None
        shows = counts is not None and self.args.log_completions
        if ends_window(logs, self):
            self._completions.write(self, shows=shows)
        super().log(logs if counts is None else {**logs, **counts.logged()}, start_time)
        if shows:
            self._completions.show(self)

    # ---- evaluation

    def get_eval_dataloader(self, eval_dataset: str | AnyDataset | None = None) -> DataLoader:
        """Batches of numbered rows of prompts."""
        sets = by_name(self.eval_dataset)
        rows: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(rows, str):
            rows = sets[rows]
        if rows is None:
            raise ValueError("evaluation needs an eval_dataset, got None. Pass it to the trainer or to evaluate.")
        processes = 1 if self.method.pairs_rows else self.args.world_size
        check_evaluation(self.args.eval_batch_size * processes, self.evaluation_group)
        if not any(rows is prepared for prepared in sets.values()):
            rows = self._sets(group_setup.environment_rows(self.rollouts.completer, rows), "eval")
        numbered = NumberedRows(rows, self.evaluation_group)
        return self.accelerator.prepare(DataLoader(numbered, self.args.eval_batch_size, collate_fn=list))

    def get_test_dataloader(self, test_dataset: AnyDataset) -> DataLoader:
        """`get_eval_dataloader` for the rows of `predict`."""
        return self.get_eval_dataloader(test_dataset)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate; see `BaseTrainer.evaluation_loop`. Environments are closed after it, unless training continues."""
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            if not self.is_in_train:
                self.rollouts.close()

    @torch.no_grad()
    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, None, None]:
        """Complete a batch of prompts, judge it as in training, and record its metrics and its loss."""
        self.rollouts.follow(self.model_wrapped, self.state)
        experience = self.scored(self.rollouts.evaluate(inputs), learning=False)
        experience = self.advantages(experience, group_size=self.evaluation_group)
        rows = of_all_processes(experience, self.accelerator, is_evaluation=True)
        metrics = self.method.metrics(rows, self.rollouts.rewards.names, self.evaluation_group)
        self._sums["eval"].add(*split_extremes(shared(metrics, 1 / self.args.world_size)))
        count = min(local_rows(self.accelerator, self.args.eval_batch_size), len(inputs))
        # A process without a row of its own runs a group for the collectives; a method may compare its rows.
        experience = experience.take(torch.arange(count or min(self.evaluation_group, len(inputs))))
        if count:
            self._sums["eval"].add(shared(self.method.token_metrics(experience), self.args.sp_size))
        group, local = self.scorer.group, (experience, count > 0)
        for rows, is_counted in [local] if group is None else group.objects(local):
            batch = on_device(self, self.micro_batch(rows))
            outcome = self.outcome(model, batch)
            if is_counted:
                weight, counts = self.scorer.router_weight, self.method.count(batch)
                self.run_metrics.record("eval", outcome, counts, self.method, router_weight=weight)
        return None, None, None

    # ---- checkpoints

    def rollout_facts(self) -> Mapping[str, int]:
        """The sizes that decide which rows of a rollout batch a step learns from."""
        return replace(self.sizes, processes=self.args.data_processes).cut

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train; see `transformers.Trainer.train`. Resuming is bit-exact, within a rollout batch too."""
        beta = self.args.beta if isinstance(self.args, GroupTraining) else 0
        if beta and self.reference is None:
            raise ValueError(
                f"beta={beta} needs a reference policy, and the trainer was built with beta=0. Set beta in the config "
                "before the trainer is built."
            )
        self._rollout_batch, self._learned, self._batch_number, self._sample = None, None, -1, None
        if self._token_counts is not None:
            self._token_counts.load_state({})
        try:
            result = super().train(resume_from_checkpoint, *args, **kwargs)
            show_sample(self, self._sample)
            return result
        finally:
            self.rollouts.close()

    def save_progress(self, folder: Path) -> None:
        """Write into a checkpoint also the rollout batch that the run is in."""
        super().save_progress(folder)
        step = self.state.global_step % self.sizes.steps
        if (journal := getattr(self.rollouts.completer, "journal", None)) is not None:
            journal.prune(self.state.global_step - step, run=self.runs.name)
        if self._rollout_batch is not None and step:
            facts = self.sizes.facts(self.state.global_step, seed=self.rollouts.prompts.seed)
            save_rollout_batch(folder, self._rollout_batch, rank=self.args.process_index, facts=facts)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.rollouts.forget_weights()

    def load_progress(self, folder: Path) -> None:
        """Load what `save_progress` wrote, when training begins."""
        super().load_progress(folder)
        self.rollouts.forget_weights()  # the weights have just been loaded too
        self._batch_number, step = divmod(self.state.global_step, self.sizes.steps)
        if step:
            place = {"rank": self.args.process_index, "processes": self.args.world_size}
            facts = self.sizes.facts(self.state.global_step, seed=self.rollouts.prompts.seed)
            if not self.runs.starts_anew("progress"):
                self._rollout_batch = load_rollout_batch(folder, facts=facts, **place)
            if self._rollout_batch is None:
                logger.warning(
                    "%s holds no rollouts that fit this run's batch size and steps. They are sampled again by the "
                    "checkpoint's policy, so the run differs from one that was not stopped. Resume with its settings.",
                    folder,
                )
