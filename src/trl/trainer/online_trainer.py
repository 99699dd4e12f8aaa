"""What the trainers that learn from their own rollouts share: prompts, rollouts, rewards, advantages, objective."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trl.data.rendering import text_tokenizer
from trl.data.streams import RowStream
from trl.generation.engine import Engine, Sampling
from trl.generation.vllm.policy_copy import PolicyCopy
from trl.models.lending import undisturbed
from trl.models.reference import Reference
from trl.models.scoring.causal import Scored
from trl.models.scoring.head import LossOf, ScoreOptions
from trl.rewards.inputs import RewardInputs
from trl.rewards.source import RewardSources
from trl.rollouts.columns import OLD, SAMPLING_LOGPS, SCORES, TRAINED
from trl.rollouts.experience import Experience, load_rollout_batch, save_rollout_batch
from trl.rollouts.maker import Completer, Prompts, RolloutMaker, Rows
from trl.rollouts.refill import Refill
from trl.rollouts.schedule import RolloutSizes, step_rows
from trl.tensors.reduce import LossTerms, Unit, Weighted
from trl.trainer.base_trainer import BaseTrainer
from trl.trainer.method import Outcome

logger = logging.getLogger(__name__)

_EVALUATION_SEED = 0x5EED  # evaluations draw other completions than training, and the same ones every time


class OnlineTrainer(BaseTrainer):
    """Base of the trainers that learn from rollouts of the policy itself.

    The order of a rollout batch is that of `make_rollout_batch`: `rollouts` draws prompts, completes them and scores the completions; the
    models score their tokens, and the method gives them advantages. `sizes.steps` optimiser steps then learn from it, each from the rows
    that `step_rows` says. A rollout batch is part of every checkpoint that is made while it lasts.

    A method overrides `judge` (what a score becomes), `score_rollout` (what the models say of the tokens), `advantages`,
    `objective` and `rollout_metrics`, and sets the attributes below in its constructor.
    """

    units: ClassVar[tuple[Unit, ...]] = ("token",)  # type: ignore[assignment]
    repeats_metrics: ClassVar[bool] = True  # log what is measured of a rollout batch with each of its steps

    rollouts: RolloutMaker
    engine: Engine  # these three are those of `rollouts`
    sampling: Sampling
    rewards: RewardSources
    sizes: RolloutSizes
    reference: Reference | None = None
    shares_prefix: bool = False
    evaluation_group: int = 1  # completions of each evaluation prompt
    _rollout_batch: Experience | None = None
    _batch_number: int = -1
    _resumed_from: str | None = None
    _random_state_of: str | None = None

    # ---- the hooks of a method

    def judge(
        self, experience: Experience, scores: Tensor, inputs: RewardInputs, *, training: bool
    ) -> Experience:
        """With the column `scores` (one per row) and, per token, `trained`; rows whose score is NaN are not trained on.

        `inputs` is what the reward sources were given; `training` is false for an evaluation.
        """
        known = ~scores.isnan()
        trained = known[experience.completions.row_index]
        return experience.with_rows(**{SCORES: scores.nan_to_num(0.0)}).with_tokens(**{TRAINED: trained})

    def score_rollout(self, batch: dict[str, Any], *, learning: bool) -> dict[str, Tensor]:
        """Numbers `(K,)` for each completion token of some rows of a rollout, without gradient; `old_logps` among them
        unless `sampler_is_exact`. `learning`: whether it is to be trained on."""
        raise TypeError(f"{type(self).__name__} must override score_rollout.")

    def advantages(self, experience: Experience) -> Experience:
        """With what the objective learns from; called with the whole rollout batch of this process."""
        raise TypeError(f"{type(self).__name__} must override advantages.")

    def objective(self, experience: Experience, scored: Scored) -> Sequence[LossTerms]:
        """The terms of a micro-batch's loss, one entry per completion token."""
        raise TypeError(f"{type(self).__name__} must override objective.")

    def token_losses(self, experience: Experience) -> LossOf | None:
        """What each completion token adds to the sum of the objective's terms, as far as that follows from its own log-prob;
        None where its log-prob counts in another way too.

        The head's gradient is then taken in the scoring forward, and `objective` is given log-probs without gradient. Nobody
        asks where a class that knows nothing of it replaced `objective`.
        """
        return None

    def rollout_metrics(self, experience: Experience, *, share: float) -> dict[str, Weighted]:
        """What is logged of a rollout batch, or of the completions of an evaluation; these rows are a `share` of the whole."""
        return {}

    def score_options(self) -> ScoreOptions:
        """What the scoring forward of a micro-batch is asked for."""
        entropy = "scored" if self.statistics_due() else "none"
        return ScoreOptions(entropy=entropy, temperature=self.sampling.temperature)

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
        """Make `rollouts`, at the end of the constructor."""
        rows: Any = self.train_dataset
        assert isinstance(rows, (Dataset, RowStream))
        self.rollouts = RolloutMaker(
            Prompts(rows, self.sizes.prompts, self._data_seed(), shuffle),
            self.sizes,
            engine=engine,
            sampling=sampling,
            rewards=rewards,
            judge=self.judge,
            tokenizer=text_tokenizer(self.processing_class),  # type: ignore[arg-type]
            accelerator=self.accelerator,
            completer=completer,
            refill=refill,
        )

    def make_rollout_batch(self, number: int) -> Experience:
        """Rollout batch `number` of this run: completions by the present policy, and what is to be learned of them."""
        self.rollouts.follow(self.model_wrapped, self.state)
        return self.advantages(self.scored(self.rollouts.make(number), learning=True))

    def scored(self, experience: Experience, *, learning: bool) -> Experience:
        """With what the models say of the completions' tokens."""
        if self.sampler_is_exact:
            experience = experience.with_tokens(**{OLD: experience.per_token[SAMPLING_LOGPS]})
        return experience.with_tokens(**self._score_tokens(experience, learning=learning))

    @property
    def sampler_is_exact(self) -> bool:
        """Whether the sampler's log-probs are those of the scoring forward, up to rounding: then nobody asks again.

        Lower precision, distributions that are cut or bent, and models that turn long rows by other angles than short ones
        (a cache holds keys of when they were short) are scored again.
        """
        wide = all(part.dtype in (torch.float32, torch.float64) for part in self.scorer.core.parameters())
        plain = self.accelerator.mixed_precision == "no" and not self.scorer.stretched_rotaries
        return self.rollouts.exact and wide and plain

    @torch.no_grad()
    def _score_tokens(self, experience: Experience, *, learning: bool) -> dict[str, Tensor]:
        """`score_rollout` of all rows, a few at a time; results on the CPU."""
        parts: list[dict[str, Tensor]] = []
        with undisturbed(self.model_wrapped):  # type: ignore[arg-type]
            for rows in torch.arange(len(experience)).split(self.rows_at_once()):
                batch = self.batch_of(experience.take(rows))
                parts.append(self.score_rollout(self._prepare_inputs(batch), learning=learning))  # type: ignore[arg-type]
        return {name: torch.cat([part[name].cpu() for part in parts]) for name in parts[0]}

    def rows_at_once(self) -> int:
        """Rows that are scored in one forward after a rollout."""
        return self.args.per_device_train_batch_size

    def check_reward_columns(self) -> None:
        """Before the first rollout: raise ValueError where a reward function names an argument that no column gives."""
        given: Any = self.eval_dataset
        later = list(given.values()) if isinstance(given, dict) else [given] if given is not None else []
        for rows in (self.rollouts.prompts.rows, *later):
            columns = self.rollouts.prompts.reward_columns
            self.rewards.check_columns([name for name in columns if name in rows.column_names])

    def _data_seed(self) -> int:
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

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
        if is_new or self.repeats_metrics:
            self._sums["train"].add_all(
                self.rollout_metrics(self._rollout_batch, share=1 / self.args.world_size)
            )
        batches = [self.micro_batch(self._rollout_batch.take(own)) for own in rows[: len(turns)]]
        return super().get_batch_samples(iter(batches), len(batches), device)

    def rows_of_step(self, step: int, sizes: RolloutSizes | None = None) -> list[Tensor]:
        """Which of this process's rows of the rollout batch each micro-batch of one of its optimiser steps learns from."""
        place = {"batch": self._batch_number, "process": self.args.process_index}
        return step_rows(step, sizes or self.sizes, seed=self._data_seed(), **place)

    def micro_batch(self, experience: Experience) -> dict[str, Any]:
        """What `compute_loss` is given: a batch of some rows, and the rows."""
        return {**self.batch_of(experience), "experience": experience}

    def batch_of(self, experience: Experience) -> dict[str, Any]:
        """What the models are given of some rows, whose scored tokens are the completions', in order."""
        return experience.as_batch(prefix_sharing=self.shares_prefix)

    def count_units(self, batch: Mapping[str, Any]) -> Tensor:
        """How many completion tokens a batch trains: int64 `(1,)`."""
        return batch["experience"].per_token[TRAINED].sum().long().view(1)

    def outcome(self, model: nn.Module, batch: Mapping[str, Any]) -> Outcome:
        """The terms of a micro-batch."""
        inputs = dict(batch)
        experience: Experience = inputs.pop("experience")
        experience = experience.to(self.args.device)
        asks = torch.is_grad_enabled() and is_overridden_with(type(self), "objective", "token_losses")
        losses = self.token_losses(experience) if asks else None
        scored = self.score(model, inputs, replace(self.score_options(), loss_of=losses))
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
        loader = DataLoader(
            _Numbered(self.prepared_prompts(chosen), self.evaluation_group),  # type: ignore[arg-type]
            batch_size=self.args.eval_batch_size,
            collate_fn=list,
            generator=torch.Generator(),  # or an evaluation would move the random stream that dropout is drawn from
        )
        return self.accelerator.prepare(loader)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """The same of the rows that `predict` is given."""
        return self.get_eval_dataloader(test_dataset)

    def prepared_prompts(self, dataset: Any) -> Dataset:
        """A data set that is given later than to the constructor, with its prompts tokenised."""
        return dataset

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
            "seed": self._data_seed(),
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


def is_overridden_with(kind: type, method: str, other: str) -> bool:
    """Whether the class whose `method` counts in `kind` knows the `other` too: it overrides both, or a class below it does."""
    places = [
        next(place for place, each in enumerate(kind.__mro__) if name in vars(each))
        for name in (other, method)
    ]
    return places[0] <= places[1]


class _Numbered(torch.utils.data.Dataset):
    """Rows of a data set, each several times in turn, with their numbers in a column `row`."""

    def __init__(self, dataset: Dataset, copies: int) -> None:
        self.dataset, self.copies = dataset, copies

    def __len__(self) -> int:
        return len(self.dataset) * self.copies

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.dataset[index // self.copies], "row": index}
