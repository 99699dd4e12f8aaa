"""What every trainer shares: one division per optimiser step, metrics with their counts, exact resume.

`BaseTrainer` replaces no loop of `transformers.Trainer`. `get_batch_samples` draws all micro-batches of a step and
counts what they train over all processes; each is scored and contributes `sum(values * weights) / count`, so the
gradient does not depend on how the step was cut.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NoReturn
from weakref import proxy

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import EvalLoopOutput

from trl.checkpoints.runs import Runs
from trl.checkpoints.spread import Spread
from trl.methods.method import ALONE, Batch, Method, Outcome, Scoring, Step, StepPart
from trl.models.activation_offloading import get_act_offloading_ctx_manager
from trl.models.packed.layout import STEP_PART, Inputs, count_tokens
from trl.models.peft import AdapterConfig
from trl.models.policy import Policy, set_up_policy
from trl.models.reference import FrozenModel
from trl.models.residuals import keep_residuals
from trl.models.scoring.causal import Scorer
from trl.models.scoring.values import PolicyValueScorer
from trl.models.setup import ClassifierKind
from trl.models.step_state import own_rng_states
from trl.models.switches import has_dropout, holding, seed_of, seeded
from trl.options.training import TrainingDefaults
from trl.reporting.metrics import MetricSums, Processes
from trl.reporting.model_card import Paper, is_generated
from trl.reporting.run_lines import use_run_lines
from trl.rollouts.token_counts import TokenCounts
from trl.trainer import evaluation, loaders, run_metrics, saving
from trl.trainer.arguments import Processor
from trl.trainer.callbacks.checkpoints import AtTrainBegin, at_step_ends
from trl.trainer.callbacks.hang import EndsHangs
from trl.trainer.callbacks.run_report import RunReport
from trl.trainer.inherited import Data, replace_inherited, settle_inherited


class BaseTrainer(Trainer):
    """`transformers.Trainer` with exact normalisation over the optimiser step, weighted metrics and exact resume.

    The loss of a micro-batch is the sum of the terms of its `outcome`: its `method`'s, of what the scorer makes of it.
    """

    method: Method = Method()

    _tag_names: ClassVar[list[str]] = ["trl"]
    _name: ClassVar[str] = "training"
    _paper: ClassVar[Paper | None] = None
    _config_class: ClassVar[type]
    _columns: tuple[str, ...] = ()  # that a collator reads
    _predictions: ClassVar[str] = "predictions"  # their name in the outputs of `compute_loss`
    shares_tokens: ClassVar[bool] = False  # whether several processes may share the tokens of a batch (sp_size)
    reads_rounds: ClassVar[bool] = True  # evaluations read each row once, in rounds of one batch for each process
    evaluation_metrics: ClassVar[tuple[str, ...]] = ("loss",)  # that every evaluation has

    args: TrainingDefaults
    scorer: Scorer | PolicyValueScorer
    reference: Any = None
    reference_logps: Any = None  # of a batch's completions, for methods with `reference_names`
    teacher: Any = None
    _moved_reference: FrozenModel | None = None  # a reference that a callback moves: part of checkpoints
    _token_counts: TokenCounts | None = None  # of sampled tokens; None: tokens are counted when they are trained on

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """The arguments of `transformers.Trainer`; `sets` prepare the data."""
        self.check_class()
        self._sets = loaders.prepare_sets(kwargs) or self._sets
        self._sums = {"train": MetricSums(), "eval": MetricSums()}
        super().__init__(*args, **kwargs)
        self.processes = Processes(self.accelerator, self.args.sp_size)
        trainer = proxy(self)  # a cycle would keep a trainer, and the folder of its run, after its last use
        saving.check_async_save(self)
        self.runs = Runs(self.accelerator, lambda: saving.facts_of(trainer))
        self.run_metrics = run_metrics.RunMetrics(self.processes, self._sums)
        self._at_begin = AtTrainBegin(lambda: saving.begin_training(trainer))
        self.add_callback(self._at_begin)
        self._input_tokens = run_metrics.InputTokens(self.processes, self.args.include_num_input_tokens_seen)
        self.add_callback(self._input_tokens)
        run_metrics.watch_gradients(trainer)
        use_run_lines(self.callback_handler, kwargs.get("callbacks") or (), self.args)
        self.run_report = RunReport(trainer)
        self.add_callback(self.run_report)
        self._hang_watch = EndsHangs(self.args.hang_timeout)
        self.add_callback(self._hang_watch)
        self._signature_columns = list(self._columns)
        evaluation.chosen_metric(self.args, self.eval_dataset)  # whose set must exist
        at_step_ends(self.callback_handler.callbacks)
        replace_inherited(self)
        if hasattr(self.model, "add_model_tags"):
            self.model.add_model_tags(self._tag_names)  # type: ignore[operator,union-attr]
        if getattr(self.args, "activation_offloading", False):
            offloading = get_act_offloading_ctx_manager(self.model)  # type: ignore[arg-type]
            self._offloading = lambda: offloading

    def begin(
        self, model: object, args: Any, processing_class: Processor | None, peft_config: AdapterConfig,
        older: Mapping[str, object] = {},
        *, data: Data = "pairs", classifier: ClassifierKind | None = None,
    ) -> tuple[Policy, Any]:  # fmt: skip
        """The policy and the config, at the start of a constructor. Raises TypeError for `older` arguments."""
        self._path = model if isinstance(model, str) else None
        settle_inherited(args, data, older)
        policy = set_up_policy(
            model, args, processing_class, peft_config, classifier=classifier, shares_tokens=self.shares_tokens
        )
        self.scorer, self._tokenizer = policy.scorer, policy.tokenizer
        return policy, args

    _path: str | None = None  # of the model that was given by name
    _sets: Any = None
    _offloading: Callable[[], AbstractContextManager[object]] = nullcontext

    def check_class(self) -> None:
        """Called first in the constructor: raises TypeError for a class that cannot be trained."""

    # ---- one optimiser step

    layout: Callable[[Batch], Batch] | None = None  # of a batch, perhaps of a user's own collator, to the method's form

    def take_batch(self, batch: Batch) -> Any:
        """A batch in the method's `layout`, with its part of the step."""
        exact = batch.get(STEP_PART, ALONE).exact
        batch = {**batch, **exact} if exact else batch
        rows = batch if self.layout is None else self.layout(batch)
        return rows if STEP_PART in rows or STEP_PART not in batch else {**rows, STEP_PART: batch[STEP_PART]}

    handed_out: Callable[[Inputs, Batch], Inputs] | None = None
    """What `compute_loss` is given for a batch, which `take_batch` made from the collator's; None: the batch."""

    def prepare_step(self, batches: list[Inputs]) -> None:
        """Put into the batches of a step what the method must know of the whole step, before the first."""
        plans = self.method.plan(batches, self.scoring())
        for batch, plan in zip(batches, plans, strict=True):
            if plan is not None:
                batch[STEP_PART] = replace(batch.get(STEP_PART, ALONE), plan=plan)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Inputs], num_batches: int, device: torch.device
    ) -> tuple[list[Inputs], Tensor | None]:
        """The micro-batches of one optimiser step and their count over all of them and all processes, at least 1."""
        self._turns, drawn = 0, list(islice(epoch_iterator, num_batches))
        if drawn and loaders.fills_up(self.accelerator.gradient_state, self.args):
            drawn[-1] = {**drawn[-1], STEP_PART: StepPart(fills_up=True)}
        batches = [self.take_batch(batch) for batch in drawn]
        counts = [self.method.count(batch).to(device) * (STEP_PART not in batch) for batch in batches]
        if self.handed_out is not None:
            batches = list(map(self.handed_out, batches, drawn))
        count = sum(counts, torch.zeros((), dtype=torch.int64, device=device))
        if self.accelerator.num_processes > 1:
            count = self.processes.once(self.accelerator.reduce(count, reduction="sum"))  # type: ignore[arg-type]
        assert isinstance(count, Tensor)
        if batches:
            if self.runs.random_state_is_due and self.runs.current:
                # Before plans draw numbers, where transformers would do it after.
                self._load_rng_state(self.runs.current.checkpoint)
            self.prepare_step(batches)
            if len(batches) * self.accelerator.num_processes > 1 and self.scorer.is_balanced and count.sum():
                # The router's loss is no sum over micro-batches: each has the routing of the whole step.
                learned = [self.method.learned(self.take_batch(loaders.on_device(self, {**b}))) for b in batches]
                parts = self.scoring().with_routing(learned, [batch.get(STEP_PART, ALONE) for batch in batches])
                for batch, part in zip(batches, parts, strict=True):
                    batch[STEP_PART] = part
        return batches, (count if len(self.method.units) > 1 else count.reshape(())).clamp(min=1)

    def training_step(self, model: nn.Module, inputs: Inputs, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """One micro-batch, forward and backward; a loss that is not finite stops the run with advice.

        The loss of an overridden `compute_loss` that does not call ours is divided by the number of micro-batches. With
        `activation_offloading` activations wait for the backward pass in CPU memory.
        """
        self.loss_is_scaled_for_ga = False
        seed = seed_of(self.args.seed, self.state.global_step, self.micro_batch_number(self._turns))
        self._turns += 1
        with holding(self, "_units_of_step", num_items_in_batch), self._offloading(), seeded(seed, self.args.device):
            loss = super().training_step(model, loaders.on_device(self, inputs), num_items_in_batch)
        run_metrics.require_finite("loss", loss.item(), self.args, self.state)
        self._input_tokens.add(inputs)
        return loss

    _units_of_step: Tensor | int | None = None
    _turns = 0  # micro-batches of the step that this process has begun

    def micro_batch_number(self, turn: int) -> int:
        """The number of this process's micro-batch `turn` among those of the step, in the order of their rows."""
        return turn * self.args.data_processes + self.args.data_index

    def changed_draws(self, before: Spread, now: Spread) -> list[str]:
        """What is drawn otherwise where a step's rows are cut otherwise; a micro-batch draws the same anywhere."""
        drawn = {"dropout": has_dropout(self.model), "NEFTune's noise": self.scorer.neftune_alpha}  # type: ignore[arg-type]
        return [name for name, is_drawn in drawn.items() if is_drawn and before.rows != now.rows]

    def outcome(
        self, model: nn.Module, batch: Batch, *, step: Tensor | None = None, with_outputs: bool = False,
    ) -> Outcome:  # fmt: skip
        """The terms of a batch; `step`: the step's number of each unit; `with_outputs`: predictions are needed."""
        scoring = self.scoring(model, batch, counts=step, outputs=with_outputs)
        method = self.trained_method(scoring.step)
        return method.terms(batch, method.score(batch, scoring), scoring.step)

    def trained_method(self, step: Step) -> Method:
        """The method of a batch; an overridden loss of older programs stands in for it."""
        return self.method

    def scoring(self, model: nn.Module | None = None, batch: Mapping[str, Any] = {}, **options: Any) -> Scoring:
        """What the method is handed for a batch: the models, and the step that it belongs to with its `options`."""
        plan = batch.get(STEP_PART, ALONE).plan
        training, processes = self.mode == "train", self.processes
        statistics = not training or run_metrics.logs_step(self.args, self.state)  # costly ones: not between logs
        step = Step(training, processes, plan, statistics=statistics, **options)
        policy: Any = self.model_wrapped if model is None else model
        return Scoring(policy, self.scorer, self.accelerator, step, self.reference_logps, self.teacher)

    def compute_loss(
        self, model: nn.Module, inputs: Inputs, return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:  # fmt: skip
        """This micro-batch's part of the optimiser step's loss.

        `num_items_in_batch` holds the step's number of each kind of unit (all micro-batches, all processes); without it
        the loss is that of this batch alone. `return_outputs` also gives predictions and labels.
        """
        if num_items_in_batch is None:  # an override did not pass it on, or there is no step
            num_items_in_batch = self._units_of_step
        self.loss_is_scaled_for_ga = num_items_in_batch is not None
        inputs = self.take_batch(inputs)
        part = inputs.get(STEP_PART, ALONE)
        if self.mode == "train" and self._token_counts is None and not part.fills_up:
            self.run_metrics.count_tokens(count_tokens(self.method.learned(inputs), of_sequences=True))
        counts = self.method.count(inputs)
        step = counts.clamp(min=1)
        if num_items_in_batch is not None:
            step = torch.as_tensor(num_items_in_batch).view(-1)
        with holding(self.scorer, "routing_of_step", part.routing):
            outcome = self.outcome(model, inputs, step=step, with_outputs=return_outputs)
        weight = 0.0 if outcome.aux_loss is None else self.scorer.router_weight
        loss = outcome.loss(self.method.units, counts, step, router_weight=weight, router_share=part.share)
        if part.fills_up:
            loss = loss * 0  # with the collectives of the others, and a gradient of zeros
        else:
            self.run_metrics.record(
                self.mode, outcome, counts, self.method, router_weight=weight, router_share=part.share
            )
        if num_items_in_batch is not None and self.args.data_processes > 1:
            loss = loss * self.args.data_processes  # of which DDP, FSDP and DeepSpeed take the mean
        outputs = {"loss": loss, self._predictions: outcome.predictions, "labels": outcome.labels}
        outputs = {name: value for name, value in outputs.items() if value is not None}
        return (loss, outputs) if return_outputs else loss

    # ---- metrics

    @property
    def mode(self) -> str:
        """`train` or `eval`."""
        return "train" if self.model is not None and self.model.training else "eval"

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; a training loss and the summary at the end come with the metrics recorded since the last one."""
        if run_metrics.ends_window(logs, self):
            means = self.method.derived(self._sums["train"].drain(self.accelerator))
            logs = {**logs, **means, "num_tokens": self.run_metrics.num_tokens()}
        if "train_loss" in logs:
            logs["train_loss"] = self.run_metrics.mean_loss(self)
        super().log(logs, start_time)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; see `transformers.Trainer.train`. Resuming is bit-exact.

        Raises: FileNotFoundError without a checkpoint to resume from; CheckpointError for one that lost a part or is of
        another method, model or data, and where another run is active in `output_dir`; OSError for a mirror that
        cannot be read.
        """
        self.run_metrics.begin()
        loaders.check_lengths(self.accelerator, self.train_dataset, "train")
        if self._at_begin not in self.callback_handler.callbacks:  # a program took it off with the others
            self.add_callback(self._at_begin)
        with ExitStack() as stack:
            stack.push(self.run_report.close)
            run = self.runs.enter(stack, self.args, resume=resume_from_checkpoint)
            saving.name_checkpoint(self.callback_handler.callbacks, run.checkpoint)
            stack.callback(self._hang_watch.stop)  # before uploads are waited for
            output = super().train(run.checkpoint, *args, **kwargs)
            loss = self.run_metrics.mean_loss(self)  # of all processes, which have left the run's folder then
        return run_metrics.summary_of(output, self.args, self.state, loss)

    def hyperparameter_search(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises TypeError: a trainer is one run."""
        raise TypeError("hyperparameter_search is not supported. Build a trainer for each trial and call train().")

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """The rows of an optimiser step."""
        return super().get_total_train_batch_size(args) // self.args.sp_size

    def set_initial_training_values(self, args: TrainingArguments, dataloader: DataLoader) -> Any:
        """The lengths of the run; see `transformers.Trainer`."""
        return saving.remaining(super().set_initial_training_values(args, dataloader), self.runs.current)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate; see `transformers.Trainer.evaluate`."""
        with own_rng_states():  # also of callbacks
            return super().evaluate(*args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: Inputs, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Loss, and on request predictions and labels, of a batch; a row that only fills up does not count."""
        inputs = loaders.on_device(self, inputs)
        is_extra = loaders.fills_up(self.accelerator.gradient_state, self.args)
        if is_extra:
            inputs = {**inputs, STEP_PART: replace(inputs.get(STEP_PART, ALONE), fills_up=True)}
        self.gather_function = evaluation.GatherRows(self.processes, fills_up=is_extra)
        batch = self.take_batch(inputs)
        batch = loaders.on_device(self, batch if self.handed_out is None else self.handed_out(batch, inputs))
        with torch.no_grad():
            if prediction_loss_only:
                return self.compute_loss(model, batch).detach(), None, None
            return evaluation.predicted(self, model, batch)

    def evaluation_loop(
        self, dataloader: DataLoader, description: str, prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:  # fmt: skip
        """Evaluate; the loss is the mean over all scored units, however the batches were cut."""
        options = (description, prediction_loss_only, ignore_keys, metric_key_prefix)
        with evaluation.evaluating(self, dataloader, metric_key_prefix):
            output = super().evaluation_loop(dataloader, *options)
        return evaluation.with_metrics(output, self, dataloader, prefix=metric_key_prefix)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimiser, before the first step. Raises ValueError for a model without a trainable parameter."""
        run_metrics.check_trained(model or self.model, self.args.device)  # type: ignore[arg-type]
        optimizer = super().create_optimizer(model)
        if getattr(self.args, "weights", None) is not None:
            keep_residuals(optimizer)
        return optimizer

    # ---- the rows

    def get_train_dataloader(self) -> DataLoader:
        """The training batches; a stream starts again when it ends, so that every step is whole."""
        order = self._get_train_sampler
        return loaders.training_loader(self._get_dataloader, order, self.train_dataset, self._sets, self.args)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Batches of an evaluation set; rows that are not tokenised yet are prepared as those of the constructor."""
        rows = loaders.later(self._sets, eval_dataset)
        is_own = rows is None or isinstance(rows, str) or rows is self.eval_dataset
        # The parent keeps one loader with persistent workers, and takes it for any set that is given.
        persistent = self.args.dataloader_persistent_workers and is_own
        with holding(self.args, "dataloader_persistent_workers", persistent):
            return super().get_eval_dataloader(rows)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Batches to predict on; rows that are not tokenised yet are prepared as those of the constructor."""
        return super().get_test_dataloader(loaders.later(self._sets, test_dataset))

    def _get_dataloader(self, dataset: Any, *args: Any, is_training: bool = False, **kwargs: Any) -> DataLoader:
        """A loader of whole rounds, also for a user's `get_*_dataloader`; evaluations read all rows, in order."""
        make = partial(super()._get_dataloader, is_training=is_training)
        return loaders.rounds_loader(lambda rows: make(rows, *args, **kwargs), dataset, self, training=is_training)

    # ---- checkpoints

    def rollout_facts(self) -> Mapping[str, int]:
        """What the rows of a step depend on, beside their number, where completions are learned from."""
        return {}

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        """Write the checkpoint aside and rename it into place: a killed run leaves a whole one or none."""
        args = self.args
        if is_generated(Path(args.output_dir or ".")):
            self.create_model_card()
        with self.runs.writing(args, self.state) as folder, holding(args, "push_to_hub", False):
            with saving.staged(self):
                super()._save_checkpoint(model, trial)
            if not args.save_only_model:
                self.save_progress(folder)
        if args.push_to_hub:
            saving.push(self)

    def _get_output_dir(self, trial: object) -> str:
        """In a run, the run's own folder, where the parent finds no checkpoint to remove: the last one is finished."""
        self.runs.wait()
        return super()._get_output_dir(trial) if self.runs.current is None else str(self.runs.current.folder)

    def _save(self, output_dir: str | None = None, state_dict: Inputs | None = None) -> None:
        """Write the model in `save_dtype`; a checkpoint as it is trained, with that dtype in its config."""
        with saving.written_model(self, output_dir, state_dict) as state_dict:
            super()._save(output_dir, state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        wrapped = partial(super()._load_from_checkpoint, resume_from_checkpoint, model)
        saving.load_weights(self, resume_from_checkpoint, wrapped)

    def _load_best_model(self) -> None:
        self.runs.wait()
        best = str(self.state.best_model_checkpoint)
        saving.load_weights(self, best, super()._load_best_model, plain=lambda: self._load_from_checkpoint(best))

    def save_progress(self, folder: Path) -> None:
        """Write into a checkpoint what resuming needs beside weights, optimiser and random state, on every process."""
        saving.write_progress(self, folder)

    def load_progress(self, folder: Path) -> None:
        """Load what `save_progress` wrote, when training begins."""
        saving.read_progress(self, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.runs.starts_anew("optimizer"):
            saving.check_optimizer(self, checkpoint)
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        is_due, self.runs.random_state_is_due = self.runs.random_state_is_due, False
        spreads = self.runs.current.spreads if is_due and self.runs.current else None
        if spreads is not None and spreads[0].processes != spreads[1].processes:
            set_seed(seed_of(self.args.seed, self.state.global_step) % 2**32)  # states of other processes
        elif is_due:
            super()._load_rng_state(checkpoint)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, its tokenizer and a model card in a folder; a card that was written by hand stays."""
        folder = Path(output_dir or self.args.output_dir or ".")
        writes_card = not _internal_call and is_generated(folder)
        saving.save_sharded(self, folder, is_checkpoint=self.runs.holds(str(folder)))
        super().save_model(output_dir, _internal_call)
        if writes_card:  # in place of the one that PEFT writes
            saving.write_card(self, folder)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None,
        tags: str | list[str] | None = None, **_: object,
    ) -> None:  # fmt: skip
        """Write `README.md` into the output directory: what was trained on what, how, and with which versions."""
        folder = Path(self.args.output_dir or ".")
        saving.write_card(self, folder, model_name=model_name, dataset_name=dataset_name, tags=tags)
