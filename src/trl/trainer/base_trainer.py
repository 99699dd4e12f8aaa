"""What every trainer shares: one division per optimiser step, metrics with their counts, exact resume.

`BaseTrainer` adds to `transformers.Trainer` and replaces none of its loop. The order of a step: `get_batch_samples`
draws all micro-batches and counts what they train over all processes; each micro-batch is scored and contributes
`sum(values * weights) / count`; so the gradient does not depend on how the step was cut.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar
from weakref import proxy

import torch
from datasets import Dataset
from huggingface_hub import HfApi
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, Trainer
from transformers.trainer_utils import EvalLoopOutput, HubStrategy, SaveStrategy
from transformers.training_args import OptimizerNames

from trl.checkpoints.identity import run_facts
from trl.checkpoints.progress import SavesState, load_progress, on_main, save_progress
from trl.checkpoints.runs import Run, Runs
from trl.checkpoints.wholeness import naming_weights
from trl.data.prepared_sets import DataSets
from trl.data.rendering import run_date_of
from trl.data.streaming import StreamRounds, is_streaming
from trl.methods.method import CONTEXT, LOSS_PARTS, Context, Method, Outcome, Scoring, Step
from trl.models.activation_offloading import get_act_offloading_ctx_manager
from trl.models.loading import cast_state, load_checkpoint_weights, name_dtype, save_dtype
from trl.models.packed.layout import FILLS_UP, count_sequence_tokens
from trl.models.peft import is_peft_model
from trl.models.policy import Policy, set_up_policy
from trl.models.reference import FrozenModel, attach_reference
from trl.models.residuals import ClipGradients, check_residuals, keep_residuals
from trl.models.scoring.causal import Scorer
from trl.models.scoring.values import PolicyValueScorer
from trl.models.setup import ClassifierKind
from trl.models.step_state import own_rng_states
from trl.models.switches import holding
from trl.options.checks import warn_unread
from trl.options.methods import SYNC_SETTINGS
from trl.options.secrets import unwritten
from trl.reporting.metrics import MetricSums, Processes
from trl.reporting.model_card import Paper, card_of_trainer, is_generated
from trl.reporting.run_lines import use_run_lines
from trl.rollouts.token_counts import TokenCounts
from trl.tensors.reduce import Weighted
from trl.trainer.callbacks.checkpoints import AtTrainBegin, at_step_ends
from trl.trainer.callbacks.sync_ref_model import SyncRefModelCallback
from trl.trainer.evaluation import GatherRows, check_best_metric, chosen_metric, returns_dict, with_metrics
from trl.trainer.inherited import Data, settle_inherited
from trl.trainer.loaders import (
    GroupedByLength,
    check_lengths,
    fills_up,
    in_rounds,
    order_of,
    rounds_of,
    row_lengths,
    training_loader,
)
from trl.trainer.run_metrics import InputTokens, RunMetrics, check_trained, logs_step, require_finite, summary_of

logger = logging.getLogger(__name__)


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
    reads_rounds: ClassVar[bool] = True  # evaluations read each row once, in rounds of one batch for each process
    evaluation_metrics: ClassVar[tuple[str, ...]] = ("loss",)  # that every evaluation has

    scorer: Scorer | PolicyValueScorer
    reference: Any = None
    teacher: Any = None
    _moved_reference: FrozenModel | None = None  # a reference that a callback moves: part of checkpoints
    _token_counts: TokenCounts | None = None  # of sampled tokens; None: tokens are counted when they are trained on

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """The arguments of `transformers.Trainer`; `sets` prepare the data."""
        sets: DataSets | None = kwargs.pop("sets", None)
        collator = kwargs.get("data_collator")
        if isinstance(collator, PreTrainedTokenizerBase):  # it can be called, too
            raise TypeError(
                f"data_collator is a tokenizer ({type(collator).__name__}), expected a function that makes batches of rows. "
                "Give a tokenizer as processing_class=."
            )
        self.check_class()
        if sets is not None:
            self._sets = sets
            for name, prepare in (("train_dataset", sets.train), ("eval_dataset", sets.evaluation)):
                if kwargs[name] is not None:
                    kwargs[name] = prepare(kwargs[name])
        self._sums = {"train": MetricSums(), "eval": MetricSums()}
        super().__init__(*args, **kwargs)
        self._make_parts()
        use_run_lines(self.callback_handler, kwargs.get("callbacks") or (), self.args)
        self._signature_columns = list(self._columns)
        chosen_metric(self.args, self.eval_dataset)  # whose set must exist
        at_step_ends(self.callback_handler.callbacks)
        # The loss comes back divided by the count over the whole step: the parent must not divide it again.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        # Noise on embeddings is added inside the scoring forward, which knows each sequence's own length.
        self.scorer.neftune_alpha, self.neftune_noise_alpha = self.neftune_noise_alpha, None
        if self.args.device.type == "cpu":
            self.args.dataloader_pin_memory = False  # there is no device to pin for; torch would warn
        if hasattr(self.model, "add_model_tags"):
            self.model.add_model_tags(self._tag_names)  # type: ignore[operator,union-attr]
        if getattr(self.args, "activation_offloading", False):
            offloading = get_act_offloading_ctx_manager(self.model)  # type: ignore[arg-type]
            self._offloading = lambda: offloading

    def begin(
        self, model: Any, args: Any, processing_class: Any, peft_config: Any, older: Mapping[str, Any] = {},
        *, data: Data = "pairs", classifier: ClassifierKind | None = None,
    ) -> tuple[Policy, Any]:  # fmt: skip
        """The policy and the config, at the start of a constructor. Raises TypeError for `older` arguments."""
        if older:
            raise TypeError(
                f"unexpected keyword arguments {sorted(older)}. Settings are fields of {type(args).__name__}."
            )
        self._path = model if isinstance(model, str) else None
        settle_inherited(args, data)
        policy = set_up_policy(model, args, processing_class, peft_config, classifier=classifier)
        self.scorer, self._tokenizer = policy.scorer, policy.tokenizer
        return policy, args

    _path: str | None = None  # of the model that was given by name
    _sets: Any = None
    _offloading: Callable[[], AbstractContextManager[Any]] = nullcontext

    def _make_parts(self) -> None:
        """The parts of a trainer that the constructor of transformers has built."""
        accelerator, counted = self.accelerator, self.args.include_num_input_tokens_seen
        trainer = proxy(self)  # a cycle would keep a trainer, and the folder of its run, after its last use
        self.runs, self.run_metrics = Runs(accelerator), RunMetrics(accelerator, self._sums)
        self.add_callback(AtTrainBegin(lambda: trainer._begin_training()))
        self._input_tokens = None if counted == "no" else InputTokens(accelerator, padding=counted == "all")
        if self._input_tokens is not None:
            self.add_callback(self._input_tokens)
        if self.keeps_residuals:
            check_residuals(accelerator, OptimizerNames(self.args.optim).value)
        optimizer = (lambda: trainer.optimizer) if self.keeps_residuals else None
        clip = ClipGradients(accelerator, lambda norm: trainer._require_finite("the gradient's norm", norm), optimizer)
        accelerator.clip_grad_norm_ = clip  # type: ignore[method-assign]

    def _require_finite(self, name: str, value: float) -> None:
        folder = self.state.best_model_checkpoint or self.args.output_dir
        require_finite(name, value, step=self.state.global_step + 1, folder=folder)

    def check_class(self) -> None:
        """Called first in the constructor: raises TypeError for a class that cannot be trained."""

    def settle_reference(self) -> None:
        """Bring the reference to the device, and let a callback move it (`sync_ref_model` adds one).

        Call it at the end of the constructor.
        """
        if getattr(self.args, "sync_ref_model", False):
            self.add_callback(SyncRefModelCallback(None, self.accelerator))
        elif not any(isinstance(callback, SyncRefModelCallback) for callback in self.callback_handler.callbacks):
            reason = "with sync_ref_model=False. Set sync_ref_model=True, or leave it out"
            warn_unread(self.args, SYNC_SETTINGS, reason)
        self._moved_reference = attach_reference(self.callback_handler.callbacks, self.reference, self.model)
        if self.reference is not None:
            self.reference.prepare(self.accelerator)

    # ---- one optimiser step

    layout: Callable[[Any], Any] | None = None
    """Brings a batch, perhaps of a user's own collator, into the form that the method works on."""

    def take_batch(self, batch: Any) -> Any:
        """A batch in the method's `layout`, with the context of its step."""
        rows = batch if self.layout is None else self.layout(batch)
        marks = {name: batch[name] for name in (CONTEXT, FILLS_UP) if name in batch and name not in rows}
        return {**rows, **marks} if marks else rows

    def _prepare_inputs(self, inputs: Any) -> Any:
        """A batch on the device; log-probs of others keep their precision, also under DeepSpeed, which casts floats."""
        prepared = super()._prepare_inputs(inputs)
        logps = {
            name: value.to(self.args.device)
            for name, value in inputs.items()
            if name.startswith(("ref_", "teacher_logps")) and isinstance(value, Tensor)
        }
        return {**prepared, **logps} if logps else prepared

    def handed_out(self, batch: Any, drawn: Any) -> Any:
        """What `compute_loss` is given for a batch, which `take_batch` made from the collator's, the `drawn` one."""
        return batch

    def prepare_step(self, batches: list[Any]) -> None:
        """Put into the batches of a step what the method must know of the whole step, before the first."""
        plans = self.method.plan(batches, self.scoring())
        for batch, context in zip(batches, plans, strict=True):
            if context is not None:
                batch[CONTEXT] = Context(context)

    def add_reference(self, batch: dict[str, Any]) -> None:
        """Put the reference's log-probs into the batch, if the method has a reference and they are not there yet."""

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """The micro-batches of one optimiser step and their count over all of them and all processes, at least 1."""
        batches, counts, drawn = [], [], list(islice(epoch_iterator, num_batches))
        if drawn and self._fills_up():
            drawn[-1] = {**drawn[-1], FILLS_UP: True}
        for batch in drawn:
            rows = self.take_batch(batch)
            counts.append(self.method.count(rows).to(device) * (FILLS_UP not in batch))
            batches.append(self.handed_out(rows, batch))
        count = sum(counts, torch.zeros((), dtype=torch.int64, device=device))
        if self.accelerator.num_processes > 1:
            count = self.accelerator.reduce(count, reduction="sum")
        assert isinstance(count, Tensor)
        self._unprepared = batches
        return batches, (count if len(self.method.units) > 1 else count.reshape(())).clamp(min=1)

    _unprepared: list[Any] | None = None

    def _fills_up(self) -> bool:
        place = {"process": self.args.process_index, "processes": self.args.world_size}
        return fills_up(self.accelerator.gradient_state, **place)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """One micro-batch, forward and backward; a loss that is not finite stops the run with advice.

        The loss of an overridden `compute_loss` that does not call ours is divided by the number of micro-batches. With
        `activation_offloading` activations wait for the backward pass in CPU memory.
        """
        if self._unprepared:  # not when they were drawn: what a run goes on from is loaded after that
            batches, self._unprepared = self._unprepared, None
            self.prepare_step(batches)
            # A subclass may have copied the first batch before it was prepared.
            inputs = {**inputs, **({CONTEXT: batches[0][CONTEXT]} if CONTEXT in batches[0] else {})}
        self._units_of_step, self.loss_is_scaled_for_ga = num_items_in_batch, False
        try:
            with self._offloading():
                loss = super().training_step(model, inputs, num_items_in_batch)
        finally:
            self._units_of_step = None
        self._require_finite("loss", loss.item())
        if self._input_tokens is not None:
            self._input_tokens.add(inputs)
        return loss

    _units_of_step: Tensor | int | None = None

    # ---- the loss

    def outcome(
        self, model: nn.Module, batch: Any, *, step: Tensor | None = None, with_outputs: bool = False
    ) -> Outcome:
        """The terms of a batch.

        `step`: the step's number of each kind of unit, None for a batch by itself. `with_outputs`: predictions are
        needed.
        """
        scoring = self.scoring(model, batch, counts=step, outputs=with_outputs)
        method = self.trained_method(scoring.step)
        return method.terms(batch, method.score(batch, scoring), scoring.step)

    def trained_method(self, step: Step) -> Method:
        """The method of a batch; an overridden loss of older programs stands in for it."""
        return self.method

    def scoring(self, model: nn.Module | None = None, batch: Mapping[str, Any] = {}, **given: Any) -> Scoring:
        """What the method is handed for a batch: the models, and the step that it belongs to with what is `given`."""
        plan = batch[CONTEXT].value if CONTEXT in batch else None
        training, processes = self.mode == "train", Processes(self.accelerator)
        step = Step(training, processes, plan, statistics=self.statistics_due(), **given)
        model = self.model_wrapped if model is None else model
        assert model is not None
        return Scoring(model, self.scorer, self.accelerator, step, self.add_reference, self.teacher)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """This micro-batch's part of the optimiser step's loss.

        `num_items_in_batch` holds the step's number of each kind of unit (all micro-batches, all processes); without it
        the loss is that of this batch alone. `return_outputs` also gives predictions and labels.
        """
        if num_items_in_batch is None:  # an override did not pass it on, or there is no step
            num_items_in_batch = self._units_of_step
        self.loss_is_scaled_for_ga = num_items_in_batch is not None
        inputs = self.take_batch(inputs)
        is_extra = FILLS_UP in inputs
        if self.mode == "train" and self._token_counts is None and not is_extra:
            self.run_metrics.count_tokens(count_sequence_tokens(self.method.learned(inputs)))
        counts = self.method.count(inputs)
        step = counts.clamp(min=1)
        if num_items_in_batch is not None:
            step = torch.as_tensor(num_items_in_batch).view(-1)
        outcome = self.outcome(model, inputs, step=step, with_outputs=return_outputs)
        loss = outcome.loss(self.method.units, counts, step, router_weight=self.scorer.router_weight)
        if is_extra:
            loss = loss * 0  # with the collectives of the others, and a gradient of zeros
        else:
            self._record(outcome, counts)
        if num_items_in_batch is not None and self.accelerator.num_processes > 1:
            loss = loss * self.accelerator.num_processes  # of which DDP, FSDP and DeepSpeed take the mean
        outputs = {"loss": loss, self._predictions: outcome.predictions, "labels": outcome.labels}
        outputs = {name: value for name, value in outputs.items() if value is not None}
        return (loss, outputs) if return_outputs else loss

    def _record(self, outcome: Outcome, counts: Tensor) -> None:
        sums = self._sums[self.mode]
        sums.add_extremes(outcome.extremes)
        for terms in outcome.terms:
            sums.add(terms.metrics)
        if outcome.aux_loss is not None:
            sums.add({"aux_loss": Weighted(outcome.aux_loss, torch.ones(()))})
        if self.mode == "eval":
            units = self.method.units
            totals = outcome.totals(units, counts, router_weight=self.scorer.router_weight)
            for unit, *part in zip(units, totals, counts, strict=True):
                sums.add({LOSS_PARTS + unit: Weighted(*part)})

    # ---- metrics

    @property
    def mode(self) -> str:
        """`train` or `eval`."""
        return "train" if self.model is not None and self.model.training else "eval"

    def statistics_due(self) -> bool:
        """Whether this step's costly statistics (entropy) will be logged; between logs they are not computed."""
        return self.mode == "eval" or logs_step(self.args, self.state)

    def num_tokens(self) -> float:
        """Real tokens trained on so far, over all processes."""
        return self.run_metrics.num_tokens()

    def ends_window(self, logs: Mapping[str, float]) -> bool:
        """Whether these logs hold a training loss, or are the summary of a run with steps that were not logged yet."""
        if "train_loss" in logs:
            return self.state.global_step > self._globalstep_last_logged
        return "loss" in logs

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; a training loss and the summary at the end come with the metrics recorded since the last one."""
        if self.ends_window(logs):
            means = self.method.derived(self._sums["train"].drain(self.accelerator))
            logs = {**logs, **means, "num_tokens": self.num_tokens()}
        if "train_loss" in logs:
            logs["train_loss"] = self._mean_loss()
        super().log(logs, start_time)

    def _mean_loss(self) -> float:
        return self.run_metrics.mean_loss(self._total_loss_scalar, self.state.global_step)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; see `transformers.Trainer.train`. Resuming is bit-exact.

        Raises: FileNotFoundError where there is nothing to resume from; CheckpointError where the checkpoint lost a
        part or is of another method, model or data, and where another run is active in `output_dir`.
        """
        self.run_metrics.begin()
        check_lengths(self.accelerator, self.train_dataset, "train")
        with ExitStack() as stack:
            run = self._enter_run(stack, resume_from_checkpoint)
            output = super().train(run.checkpoint, *args, **kwargs)
        if self.args.load_best_model_at_end and self.state.best_global_step and not self.state.best_model_checkpoint:
            logger.warning(
                "The best model, of step %d, was not saved, so the model is that of the last step. Set save_steps to eval_steps.",
                self.state.best_global_step,
            )
        return summary_of(output, self.state.log_history, self._mean_loss())

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Raises TypeError: a trainer is one run."""
        raise TypeError("hyperparameter_search is not supported. Build a trainer for each trial and call train().")

    def set_initial_training_values(self, args: Any, dataloader: DataLoader) -> Any:
        """The lengths of the run; see `transformers.Trainer`.

        No epoch is left where the run resumes from its last checkpoint, where the parent would train one more step.
        """
        values = super().set_initial_training_values(args, dataloader)
        epochs, updates, *_, max_steps = values
        done = 0 if self.runs.current is None else self.runs.current.step
        return values if done < max_steps else (min(epochs, done // updates), *values[1:])

    def _begin_training(self) -> None:
        """Check what the first evaluation needs, or load the state of the checkpoint, when training begins."""
        checkpoint = None if self.runs.current is None else self.runs.current.checkpoint
        if self.state.global_step == 0:
            check_best_metric(self)
        if checkpoint is None:
            return
        self.load_progress(Path(checkpoint))
        order = order_of(self.callback_handler.train_dataloader)
        if isinstance(order, GroupedByLength):  # the parent does not find it where several processes skip seen rows
            order.set_epoch(int(self.state.epoch or 0))
        if self.state.global_step >= self.state.max_steps:  # there is no step before which the parent would load it
            loader: Any = self.callback_handler.train_dataloader
            self.state.num_train_epochs = super().set_initial_training_values(self.args, loader)[0]
            self._load_rng_state(checkpoint)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate; see `transformers.Trainer.evaluate`."""
        with own_rng_states():  # also of callbacks
            return super().evaluate(*args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Loss, and on request predictions and labels, of a batch; a row that only fills up does not count."""
        inputs = self._prepare_inputs(inputs)
        is_extra = self._fills_up()
        if is_extra:
            inputs = {**inputs, FILLS_UP: True}
        self.gather_function = GatherRows(self.accelerator, fills_up=is_extra)
        batch = self._prepare_inputs(self.handed_out(self.take_batch(inputs), inputs))
        with torch.no_grad():
            if prediction_loss_only:
                return self.compute_loss(model, batch).detach(), None, None
            loss, outputs = self.compute_loss(model, batch, return_outputs=True)
            # Those of an overridden method may lack them.
            predictions, labels = (
                outputs.get(name) if isinstance(outputs, Mapping) else None for name in (self._predictions, "labels")
            )
            labels = self.labels_of(batch) if labels is None else labels
            if predictions is None or labels is None:
                with self.run_metrics.unrecorded():
                    _, predictions, labels, *_ = self.outcome(model, self.take_batch(batch), with_outputs=True)
            return loss.detach(), predictions.detach(), labels

    def labels_of(self, batch: Any) -> Any:
        """The labels of a batch; None where they are known only together with predictions."""
        return None

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate; the loss is the mean over all scored units, however the batches were cut.

        Random numbers of later training stay the same.
        """
        is_half = self.args.bf16_full_eval or self.args.fp16_full_eval
        if is_half and not self.is_in_train and self.reference is not None:  # as the parent casts the policy
            self.reference.cast(torch.float16 if self.args.fp16_full_eval else torch.bfloat16)
        self._sums["eval"].drain()
        check_lengths(self.accelerator, dataloader.dataset, metric_key_prefix)
        if self.reads_rounds:  # a loader of an overridden `get_eval_dataloader` too
            in_rounds(dataloader, self.args.world_size)
        with own_rng_states(), holding(self, "compute_metrics", returns_dict(self.compute_metrics)):
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        tokens, derived = self.num_tokens, self.method.derived
        rows = getattr(rounds_of(dataloader), "count", 0)  # a stream's, unless workers read it in their own processes
        output = output._replace(num_samples=rows or output.num_samples)
        sums, accelerator = self._sums["eval"], self.accelerator
        return with_metrics(output, sums, accelerator, prefix=metric_key_prefix, derived=derived, num_tokens=tokens)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimiser, before the first step. Raises ValueError for a model without a trainable parameter."""
        check_trained(model or self.model, self.args.device)  # type: ignore[arg-type]
        optimizer = super().create_optimizer(model)
        if self.keeps_residuals:
            keep_residuals(optimizer)
        return optimizer

    @property
    def keeps_residuals(self) -> bool:
        """Whether the weights train in bfloat16 with residuals."""
        return getattr(self.args, "weights", None) is not None

    # ---- the rows

    def get_train_dataloader(self) -> DataLoader:
        """The training batches; a stream starts again when it ends, so that every step is whole."""
        args, rows = self.args, self.train_dataset
        has_own_order = type(self)._get_train_sampler is not Trainer._get_train_sampler  # of a program's subclass
        if args.train_sampling_strategy == "group_by_length" and isinstance(rows, Dataset) and not has_own_order:
            tokens = None if self._sets is None else self._sets.row_tokens(rows)
            lengths = row_lengths(rows, tokens, args.length_column_name)
            step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
            order: Any = lambda _: GroupedByLength(step, lengths, seed=self.order_seed)  # noqa: E731
        else:
            order = self._get_train_sampler
        return training_loader(
            partial(self._get_dataloader, sampler_fn=order), rows, batch=args.train_batch_size, processes=args.world_size,
            worker_seed=self.order_seed if args.dataloader_persistent_workers else None,
        )  # fmt: skip

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Batches of an evaluation set; rows that are not tokenised yet are prepared as those of the constructor."""
        rows = eval_dataset if self._sets is None else self._sets.later(eval_dataset)
        is_own = rows is None or isinstance(rows, str) or rows is self.eval_dataset
        # The parent keeps one loader with persistent workers, and takes it for any set that is given.
        persistent = self.args.dataloader_persistent_workers and is_own
        with holding(self.args, "dataloader_persistent_workers", persistent):
            return super().get_eval_dataloader(rows)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Batches to predict on; rows that are not tokenised yet are prepared as those of the constructor."""
        rows = test_dataset if self._sets is None else self._sets.later(test_dataset)
        return super().get_test_dataloader(rows)

    def _get_dataloader(self, dataset: Any, *args: Any, is_training: bool = False, **kwargs: Any) -> DataLoader:
        """A loader of whole rounds, also for a program's own `get_*_dataloader`; evaluations read all rows, in order."""
        settings = self.args
        if not is_training and is_streaming(dataset):  # hides a length of other rows (ConstantLengthDataset)
            place = {"process": settings.process_index, "processes": settings.world_size}
            dataset = StreamRounds(dataset, settings.eval_batch_size, **place)
        drops = is_training and settings.dataloader_drop_last
        order = settings.train_sampling_strategy if is_training else "random"
        with holding(settings, "dataloader_drop_last", drops), holding(settings, "train_sampling_strategy", order):
            loader = super()._get_dataloader(dataset, *args, is_training=is_training, **kwargs)
        return in_rounds(loader, settings.world_size)

    @property
    def order_seed(self) -> int:
        """The seed of the order in which rows are visited."""
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    # ---- checkpoints

    def _enter_run(self, stack: ExitStack, resume: Any = None, *, alone: bool = True, saves: bool = False) -> Run:
        """Begin a run that lasts as long as `stack`; `saves` is for one that saves whatever its `save_strategy`."""
        args = self.args

        def facts() -> dict[str, Any]:
            model: Any = self.accelerator.unwrap_model(self.model)
            found = run_facts(
                method=self._name, config=model.config, adapters=getattr(model, "peft_config", {}),
                dataset=self.train_dataset, settings={**args.to_dict(), "processes": args.world_size},
            )  # fmt: skip
            begun = run_date_of(self._tokenizer)
            return {**found, "date": begun} if begun else found

        saves = saves or args.save_strategy != SaveStrategy.NO or args.enable_jit_checkpoint
        return self.runs.enter(stack, args, facts, resume=resume, alone=alone, saves=saves)

    @property
    def newest_checkpoint(self) -> Path | None:
        """The last checkpoint that this run wrote, else the one that it resumed from."""
        return self.runs.newest_checkpoint

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write the checkpoint aside and rename it into place: a killed run leaves a whole one or none."""
        args, run = self.args, self.runs.current
        with ExitStack() as stack:
            if run is None or "method" not in run.facts:  # no run, or one that was not to save
                self._enter_run(stack, saves=True)
            with self.runs.writing(self.state, writes=args.should_save) as folder, holding(args, "push_to_hub", False):
                super()._save_checkpoint(model, trial)
                if not args.save_only_model:
                    self.save_progress(folder)
            limits = {"writes": args.should_save, "limit": args.save_total_limit}
            final = self.runs.publish(folder, Path(str(args.output_dir)), self.state, **limits)
        if is_generated(Path(args.output_dir or ".")):
            self.create_model_card()
        if args.push_to_hub:
            self._push(final)

    def _push(self, checkpoint: Path) -> None:
        args, strategy = unwritten(self.args), self.args.hub_strategy
        push = None if args.hub_always_push else self.push_in_progress
        # The files of `output_dir` must stay as they are while the main process pushes an earlier model.
        if strategy == HubStrategy.END or on_main(self.accelerator, lambda: push is not None and not push.is_done()):
            return
        # In `save_dtype`: a checkpoint's weights, which the parent would copy, are those that train.
        self.save_model(_internal_call=True)
        args.hub_strategy = HubStrategy.EVERY_SAVE
        with holding(self, "args", args):
            self._push_from_checkpoint(os.devnull)
        if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS) and self.is_world_process_zero():
            place = "last-checkpoint" if strategy == HubStrategy.CHECKPOINT else checkpoint.name
            upload = HfApi().upload_folder(
                repo_id=str(self.hub_model_id),
                folder_path=checkpoint,
                path_in_repo=place,
                commit_message=f"Training in progress, step {self.state.global_step}, checkpoint",
                token=args.hub_token,
                run_as_future=True,
                revision=args.hub_revision,
            )
            self.push_in_progress.jobs.append(upload)  # type: ignore[union-attr]

    def _get_output_dir(self, trial: Any) -> str:
        """In a run, the run's own folder, where the parent finds no older checkpoint to remove."""
        return super()._get_output_dir(trial) if self.runs.current is None else str(self.runs.current.folder)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the model in `save_dtype`; a checkpoint as it is trained, with that dtype in its config."""
        model: Any = self.accelerator.unwrap_model(self.model)
        args = unwritten(self.args)  # which are written, too
        dtype = save_dtype(model, getattr(args, "save_dtype", None))
        if dtype is not None and not self.runs.holds(output_dir):
            state_dict = cast_state(model, model.state_dict() if state_dict is None else state_dict, dtype)
        with holding(self, "args", args):
            super()._save(output_dir, state_dict)
        if args.should_save:
            name_dtype(output_dir or str(args.output_dir), dtype)

    @property
    def _wraps_weights(self) -> bool:
        return self.is_fsdp_enabled or self.is_deepspeed_enabled or is_peft_model(self.model)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with naming_weights(resume_from_checkpoint):
            if self._wraps_weights:
                super()._load_from_checkpoint(resume_from_checkpoint, model)
            else:
                load_checkpoint_weights(self.model, Path(resume_from_checkpoint))  # type: ignore[arg-type]

    def _load_best_model(self) -> None:
        best = str(self.state.best_model_checkpoint)
        if self._wraps_weights:
            with naming_weights(best):
                super()._load_best_model()
        else:
            self._load_from_checkpoint(best)

    def save_progress(self, folder: Path) -> None:
        """Write into a checkpoint what resuming needs beside weights, optimiser and random state, on every process."""
        counts = {} if self._token_counts is None else {"tokens": self._token_counts.state()}
        save_progress(
            folder,
            rank=self.args.process_index,
            state={
                "loss_since_log": self._tr_loss.item(),
                "loss_before_log": self._total_loss_scalar,
                "last_logged_step": self._globalstep_last_logged,
                "processes": self.args.world_size,
                **self.run_metrics.state(),
                "method": {**self.method.state(), **counts},
            },
        )
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, SavesState):
                callback.save_state(folder)
        if self._moved_reference is not None:
            self._moved_reference.save(str(folder))

    def load_progress(self, folder: Path) -> None:
        """Load what `save_progress` wrote, when training begins."""
        if self._moved_reference is not None:
            self._moved_reference.load(str(folder))
        state = None
        if not self.runs.starts_anew("progress"):
            state = load_progress(folder, rank=self.args.process_index, processes=self.args.world_size)
        if state is None:
            self.run_metrics.uncounted_steps = self.state.global_step
            return
        self.run_metrics.load_state(state)
        self._tr_loss.fill_(state["loss_since_log"])
        self._total_loss_scalar = state["loss_before_log"]
        self._globalstep_last_logged = state["last_logged_step"]
        self.method.load_state(state.get("method", {}))
        if self._token_counts is not None:
            self._token_counts.load_state(state.get("method", {}).get("tokens", {}))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.runs.starts_anew("optimizer"):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self.runs.take_random_state():
            super()._load_rng_state(checkpoint)

    # ---- the model card

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, its tokenizer and a model card in a folder; a card that was written by hand stays."""
        folder = Path(output_dir or self.args.output_dir or ".")
        writes_card = not _internal_call and self.is_world_process_zero() and is_generated(folder)
        super().save_model(output_dir, _internal_call)
        if writes_card:  # in place of the one that PEFT writes
            card_of_trainer(self, dataset_name=None).save(folder / "README.md")

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
        **_: Any,
    ) -> None:
        """Write `README.md` into the output directory: what was trained on what, how, and with which versions."""
        if not self.is_world_process_zero():
            return
        card = card_of_trainer(self, model_name=model_name, dataset_name=dataset_name, tags=tags)
        folder = Path(self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        card.save(folder / "README.md")
