"""What the trainers that learn from their own rollouts share: prompts, rollouts, rewards, advantages, objective."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trl.data.prompts import PromptSets
from trl.data.rendering import text_tokenizer
from trl.data.streaming import RowStream
from trl.generation.engine import Engine, Sampling
from trl.generation.vllm.engine import PolicyCopy
from trl.models.reference import Reference
from trl.models.scoring.causal import Scored
from trl.models.scoring.head import LossOf, ScoreOptions
from trl.models.scoring.values import PolicyValueScorer
from trl.models.switches import undisturbed, without_ddp
from trl.rewards.models import place_reward_models
from trl.rewards.source import RewardSources
from trl.rollouts.columns import OLD, REF, SAMPLING_LOGPS, VALUES
from trl.rollouts.experience import Experience, load_rollout_batch, save_rollout_batch
from trl.rollouts.group_sizes import check_evaluation
from trl.rollouts.maker import Completer, Prompts, RolloutMaker, Rows
from trl.rollouts.refill import Refill
from trl.rollouts.rollout_func import RolloutFunction
from trl.rollouts.schedule import RolloutSizes, step_rows
from trl.tensors.reduce import LossTerms, Weighted
from trl.trainer.base_trainer import BaseTrainer
from trl.trainer.method import Outcome
from trl.trainer.online_method import OnlineMethod, StepContext

logger = logging.getLogger(__name__)

_EVALUATION_SEED = 0x5EED  # evaluations draw other completions than training, and the same ones every time


class OnlineTrainer(BaseTrainer):
    """Base of the trainers that learn from rollouts of the policy itself.

    The order of a rollout batch is that of `make_rollout_batch`: `rollouts` draws prompts, completes them and scores the completions; the
    models score their tokens, and the method gives them advantages. `sizes.steps` optimiser steps then learn from it, each from the rows
    that `step_rows` says. A rollout batch is part of every checkpoint that is made while it lasts.

    `method` is the mathematics. A subclass may override `advantages(experience)` and `objective(experience, scored)`, and sets
    the attributes below in its constructor.
    """

    method: OnlineMethod  # type: ignore[assignment]
    rollouts: RolloutMaker
    engine: Engine  # these three are those of `rollouts`
    sampling: Sampling
    rewards: RewardSources
    sizes: RolloutSizes
    reference: Reference | None = None
    shares_prefix: bool = False
    evaluation_group: int = 1  # completions of each evaluation prompt
    rows_at_once: int  # rows that are scored in one forward after a rollout
    _sets: PromptSets
    _rollout_batch: Experience | None = None
    _batch_number: int = -1
    _resumed_from: str | None = None
    _random_state_of: str | None = None

    # ---- the hooks of a method

    def advantages(self, experience: Experience) -> Experience:
        """With what the objective learns from; called with the whole rollout batch of this process."""
        raise TypeError(f"{type(self).__name__} must override advantages.")

    def objective(self, experience: Experience, scored: Scored) -> Sequence[LossTerms]:
        """The terms of a micro-batch's loss."""
        return self.method.objective(experience, scored, self.context)

    def token_losses(self, experience: Experience) -> LossOf | None:
        """The method's loss of each token; None where `objective` is overridden."""
        kinds = type(self.method).__mro__
        first = next(vars(kind) for kind in kinds if {"objective", "token_losses"} & vars(kind).keys())
        if self.overridden("objective") or "token_losses" not in first:  # of another objective, perhaps
            return None
        return self.method.token_losses(experience, self.context)

    @property
    def context(self) -> StepContext:
        """Of the current micro-batch."""
        is_first = self.mode == "train" and self.state.global_step % self.sizes.steps == 0
        return StepContext(is_first, self.sampler_is_exact)

    def rollout_metrics(self, experience: Experience, *, share: float) -> dict[str, Weighted]:
        """What is logged of a rollout batch, or of the completions of an evaluation; these rows are a `share` of the whole."""
        return {}

    # ---- a rollout batch

    def begin_rollouts(
        self,
        engine: Engine,
        sampling: Sampling,
        rewards: RewardSources,
        *,
        shuffle: bool = True,
        completer: Completer | None = None,
        refill: Refill | None = None,
    ) -> None:
        """Make `rollouts`, at the end of the constructor.

        Raises: ValueError for a reward function with an argument that no column gives.
        """
        rows: Any = self.train_dataset
        assert isinstance(rows, (Dataset, RowStream))
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
        )
        if not isinstance(completer, RolloutFunction):  # which adds columns
            given: Any = self.eval_dataset
            later = list(given.values()) if isinstance(given, dict) else [given] if given is not None else []
            for each in (rows, *later):
                columns = self.rollouts.prompts.reward_columns
                rewards.check_columns([name for name in columns if name in each.column_names])
        place_reward_models(rewards.models, self.accelerator)

    def make_rollout_batch(self, number: int) -> Experience:
        """Rollout batch `number` of this run: completions by the present policy, and what is to be learned of them."""
        self.rollouts.follow(self.model_wrapped, self.state)
        return self.advantages(self.scored(self.rollouts.make(number), learning=True))

    def scored(self, experience: Experience, *, learning: bool) -> Experience:
        """With the log-probs and values of the completions' tokens that the method needs, `rows_at_once` rows at a time."""
        is_exact, known = self.sampler_is_exact, experience.per_token
        if is_exact:
            experience = experience.with_tokens(**{OLD: known[SAMPLING_LOGPS]})
        wanted = {
            REF: self.reference is not None,
            OLD: not is_exact and (self.sizes.steps > 1 or self.method.needs_old(experience)),
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
        """Columns `(K,)` for each completion token: `old_logps` of the policy, its `values`, `ref_logps` of the reference."""
        options, found = ScoreOptions(temperature=self.sampling.temperature), dict[str, Tensor]()
        policy = without_ddp(self.model_wrapped)  # type: ignore[arg-type]
        with self.accelerator.autocast():
            if OLD in columns:
                scored = self.scorer.score(policy, batch, options)
                found = (
                    {OLD: scored.logps}
                    if scored.values is None
                    else {OLD: scored.logps, VALUES: scored.values}
                )
            elif VALUES in columns:
                assert isinstance(self.scorer, PolicyValueScorer)
                found[VALUES] = self.scorer.score_values(policy, batch)
            if self.reference is not None and REF in columns:
                found[REF] = self.reference.score(
                    self.model_wrapped,  # type: ignore[arg-type]
                    batch,
                    lambda scorer, ref, rows: scorer.score(ref, rows, options).logps,
                )
        return found

    @property
    def sampler_is_exact(self) -> bool:
        """Whether the sampler's log-probs are those of the scoring forward, up to rounding: then nobody asks again.

        Lower precision, distributions that are cut or bent, and models that turn long rows by other angles than short ones
        (a cache holds keys of when they were short) are scored again.
        """
        wide = all(part.dtype in (torch.float32, torch.float64) for part in self.scorer.core.parameters())
        plain = self.accelerator.mixed_precision == "no" and not self.scorer.stretched_rotaries
        return self.rollouts.exact and wide and plain

    # ---- the steps of a rollout batch

    def get_train_dataloader(self) -> DataLoader:
        """One number for each micro-batch of an epoch: which prompts it stands for follows from the step alone.

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
        """How many completions a loader stands for."""
        if not isinstance(dataloader.dataset, range):
            return super().num_examples(dataloader)
        return len(dataloader.dataset) * self.args.train_batch_size * self.args.world_size

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """The micro-batches of one optimiser step and their count; the first step of a rollout batch makes it."""
        turns = [turn for _, turn in zip(range(num_batches), epoch_iterator, strict=False)]
        if not turns:
            return [], None
        if self._resumed_from is not None:  # before a rollout, where transformers would do it after
            self._load_rng_state(self._resumed_from)
            self._resumed_from = None
        number, step = divmod(self.state.global_step, self.sizes.steps)
        is_new = self._rollout_batch is None or self._batch_number != number
        if is_new:
            self._rollout_batch, self._batch_number = self.make_rollout_batch(number), number
        assert self._rollout_batch is not None
        rows = self.rows_of_step(step)
        if is_new or self.method.repeats_metrics:
            self._sums["train"].add_all(
                self.rollout_metrics(self._rollout_batch, share=1 / self.args.world_size)
            )
        batches = [self.micro_batch(self._rollout_batch.take(own)) for own in rows[: len(turns)]]
        return super().get_batch_samples(iter(batches), len(batches), device)

    def rows_of_step(self, step: int, sizes: RolloutSizes | None = None) -> list[Tensor]:
        """Which of this process's rows of the rollout batch each micro-batch of one of its optimiser steps learns from."""
        place = {"batch": self._batch_number, "process": self.args.process_index}
        return step_rows(step, sizes or self.sizes, seed=self.order_seed, **place)

    def micro_batch(self, experience: Experience) -> dict[str, Any]:
        """What `compute_loss` is given: a batch of some rows, and the rows."""
        return {**self.batch_of(experience), "experience": experience}

    def batch_of(self, experience: Experience) -> dict[str, Any]:
        """What the models are given of some rows, whose scored tokens are the completions', in order."""
        return experience.as_batch(prefix_sharing=self.shares_prefix)

    def outcome(self, model: nn.Module, batch: Mapping[str, Any]) -> Outcome:
        """The terms of a micro-batch."""
        inputs = dict(batch)
        experience: Experience = inputs.pop("experience").to(self.args.device)
        losses = self.token_losses(experience) if torch.is_grad_enabled() else None
        options = self.method.options(statistics=self.statistics_due())
        options = replace(options, temperature=self.sampling.temperature, loss_of=losses)
        scored = self.score(model, inputs, options)
        terms = self.objective(experience, scored)
        predictions, labels = scored.logps.detach(), scored.positions.sequence
        return Outcome(terms, predictions, labels, scored.aux_loss, local=scored.total)

    # ---- evaluation

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Batches of numbered rows of prompts."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):
            chosen = self.eval_dataset[chosen]  # type: ignore[index]
        if chosen is None:
            raise ValueError(
                "evaluation needs an eval_dataset, got None. Pass it to the trainer or to evaluate."
            )
        check_evaluation(self.args.eval_batch_size * self.args.world_size, self.evaluation_group)
        own: Any = self.eval_dataset
        known = list(own.values()) if isinstance(own, dict) else [own]
        if not any(chosen is each for each in known):  # given to evaluate
            chosen = self._sets(chosen, "eval")
        loader = DataLoader(
            _Numbered(chosen, self.evaluation_group),  # type: ignore[arg-type]
            batch_size=self.args.eval_batch_size,
            collate_fn=list,
            generator=torch.Generator(),  # or an evaluation would move the random stream that dropout is drawn from
        )
        return self.accelerator.prepare(loader)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """The same of the rows that `predict` is given."""
        return self.get_eval_dataloader(test_dataset)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Complete a batch of prompts and record what is logged of rollouts; there is no loss."""
        own = min(self.own_rows(), len(inputs))
        rows = inputs[: max(own, 1)]  # a process without a row of its own runs one for the collectives
        whole: Any = self.callback_handler.eval_dataloader.dataset  # type: ignore[union-attr]
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        streams = evaluation_streams(columns.pop("row"))
        experience = self.evaluation_rollout(columns, streams)
        if own:
            self._sums["eval"].add_all(self.rollout_metrics(experience, share=own / len(whole)))
        return None, None, None

    def evaluation_rollout(self, rows: Rows, streams: Sequence[int]) -> Experience:
        """Completions of evaluation prompts, with their scores and what the models say of their tokens."""
        self.rollouts.follow(self.model_wrapped, self.state)
        return self.scored(self.rollouts.roll_out(rows, streams=streams, training=False), learning=False)

    # ---- checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; see `transformers.Trainer.train`. Resuming is bit-exact, within a rollout batch too."""
        self._rollout_batch, self._batch_number = None, -1
        self._resumed_from = self._random_state_of = None
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _rollout_facts(self) -> dict[str, Any]:
        """By which a saved rollout batch is known to be the one that this run is in."""
        number = self.state.global_step // self.sizes.steps
        return {
            "window": number,
            "rows": self.sizes.rows,
            "steps": self.sizes.steps,
            "seed": self.order_seed,
        }

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._rollout_batch is not None and self.state.global_step % self.sizes.steps:
            save_rollout_batch(
                Path(output_dir),
                self._rollout_batch,
                rank=self.args.process_index,
                facts=self._rollout_facts(),
            )

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._forget_copies()

    def _forget_copies(self) -> None:
        """After weights were loaded, which not all ways of doing so let an engine with a copy of them notice."""
        if isinstance(self.rollouts.engine, PolicyCopy):
            self.rollouts.engine.forget()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        self._forget_copies()  # the weights have just been loaded too
        self._resumed_from = checkpoint
        if not self.state.global_step % self.sizes.steps:
            return
        place = {"rank": self.args.process_index, "processes": self.args.world_size}
        if not self._starts_anew("progress"):
            self._rollout_batch = load_rollout_batch(Path(checkpoint), facts=self._rollout_facts(), **place)
        self._batch_number = self.state.global_step // self.sizes.steps
        if self._rollout_batch is None:
            logger.warning(
                "%s holds no rollouts that fit this run's batch size and steps, expected them in the middle of a batch of "
                "rollouts: it is made anew by the policy of the checkpoint, so the run differs from one that was not stopped. Resume with the settings it was saved with.",
                checkpoint,
            )

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and checkpoint == self._random_state_of:
            return  # done before the rollout
        super()._load_rng_state(checkpoint)
        self._random_state_of = checkpoint


def evaluation_streams(rows: Sequence[int]) -> list[int]:
    """Random streams for numbered rows of an evaluation."""
    return [_EVALUATION_SEED * 2**32 + row for row in rows]


class _Numbered(torch.utils.data.Dataset):
    """Rows of a data set, each several times in turn, with their numbers in a column `row`."""

    def __init__(self, dataset: Dataset, copies: int) -> None:
        self.dataset, self.copies = dataset, copies

    def __len__(self) -> int:
        return len(self.dataset) * self.copies

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.dataset[index // self.copies], "row": index}
