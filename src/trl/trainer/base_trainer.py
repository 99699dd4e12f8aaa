"""What every trainer shares: one division per optimiser step, metrics with their counts, exact resume.

`BaseTrainer` adds to `transformers.Trainer` and replaces none of its loop. The order of a step: `get_batch_samples`
draws all micro-batches and counts what they train over all processes; each micro-batch is scored and contributes
`sum(values * weights) / count`; so the gradient does not depend on how the step was cut.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, SequentialSampler
from transformers import PreTrainedTokenizerBase, Trainer
from transformers.trainer_utils import EvalLoopOutput, HubStrategy, IntervalStrategy, SaveStrategy, has_length
from transformers.training_args import OptimizerNames

from trl.checkpoints.identity import run_facts
from trl.checkpoints.ownership import owned, run_folder_name
from trl.checkpoints.progress import (
    CheckpointWriter,
    Run,
    SavesState,
    begin_run,
    load_progress,
    on_main,
    save_progress,
    starts_anew,
)
from trl.checkpoints.wholeness import naming_weights
from trl.data.prepared_sets import DataSets
from trl.data.ragged import list_lengths
from trl.data.rendering import run_date_of
from trl.data.streaming import RepeatedStream, StreamRounds, is_streaming
from trl.methods.method import CONTEXT, LOSS_PARTS, Context, Method, Outcome, Scoring, Step
from trl.models.activation_offloading import get_act_offloading_ctx_manager
from trl.models.loading import cast_state, load_saved_weights, name_dtype, save_dtype
from trl.models.packed.layout import FILLS_UP, count_sequence_tokens, count_tokens
from trl.models.policy import Policy, set_up_policy
from trl.models.reference import FrozenModel, attach_reference
from trl.models.residuals import check_residuals, clip_gradients, keep_residuals
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
from trl.trainer.callbacks.checkpoints import at_step_ends
from trl.trainer.callbacks.sync_ref_model import SyncRefModelCallback
from trl.trainer.inherited import (
    Data,
    GatherRows,
    GroupedByLength,
    WholeRounds,
    check_best_metric,
    check_lengths,
    chosen_metric,
    returns_dict,
    rounds_of,
    settle_inherited,
)

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
    evaluation_metrics: ClassVar[tuple[str, ...]] = ("loss",)  # that every evaluation has

    scorer: Scorer | PolicyValueScorer
    reference: Any = None
    teacher: Any = None
    _moved_reference: FrozenModel | None = None  # a reference that a callback moves: part of checkpoints
    _token_counts: TokenCounts | None = None  # of sampled tokens; None: tokens are counted when they are trained on

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """The arguments of `transformers.Trainer`, and `sets`, the `DataSets` that prepare the data sets; those for
        training are prepared by `train_sets` where it is given.
        """
        sets: DataSets | None = kwargs.pop("sets", None)
        train_sets: DataSets | None = kwargs.pop("train_sets", sets)
        collator = kwargs.get("data_collator")
        if isinstance(collator, PreTrainedTokenizerBase):  # it can be called, too
            raise TypeError(
                f"data_collator is a tokenizer ({type(collator).__name__}), expected a function that makes batches of rows. "
                "Give a tokenizer as processing_class=."
            )
        self.check_class()
        if sets is not None and train_sets is not None:
            self._sets = sets
            for name, prepare in (
                ("train_dataset", train_sets.train),
                ("eval_dataset", sets.evaluation),
            ):
                if kwargs[name] is not None:
                    kwargs[name] = prepare(kwargs[name])
        self._sums = {"train": MetricSums(), "eval": MetricSums()}
        super().__init__(*args, **kwargs)
        use_run_lines(self.callback_handler, kwargs.get("callbacks") or (), self.args)
        if self.keeps_residuals:
            check_residuals(self.accelerator, OptimizerNames(self.args.optim).value)
        self._signature_columns = list(self._columns)
        chosen_metric(self)  # whose set must exist
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
    _tokens_seen: Tensor | int = 0
    _uncounted_steps = 0
    _offloading: Callable[[], AbstractContextManager[Any]] = nullcontext

    def check_class(self) -> None:
        """Called first in the constructor: raises TypeError for a class that cannot be trained."""

    def settle_reference(self) -> None:
        """Bring the reference to the device, and let a callback move it (`sync_ref_model` adds one).

        Call it at the end of the constructor.
        """
        if getattr(self.args, "sync_ref_model", False):
            self.add_callback(SyncRefModelCallback(None, self.accelerator))
        elif not any(isinstance(each, SyncRefModelCallback) for each in self.callback_handler.callbacks):
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
        own = batch if self.layout is None else self.layout(batch)
        kept = {name: batch[name] for name in (CONTEXT, FILLS_UP) if name in batch and name not in own}
        return {**own, **kept} if kept else own

    def _prepare_inputs(self, inputs: Any) -> Any:
        """A batch on the device; log-probs of others keep their precision, also under DeepSpeed, which casts floats."""
        found = super()._prepare_inputs(inputs)
        known = {
            name: value.to(self.args.device)
            for name, value in inputs.items()
            if name.startswith(("ref_", "teacher_logps")) and isinstance(value, Tensor)
        }
        return {**found, **known} if known else found

    def handed_out(self, batch: Any, drawn: Any) -> Any:
        """What `compute_loss` is given for a batch, which `take_batch` made from the collator's, the `drawn` one."""
        return batch

    def prepare_step(self, batches: list[Any]) -> None:
        """Called with all micro-batches of an optimiser step before the first is trained on: puts what the method must
        know of the whole step into each.
        """
        plans = self.method.plan(batches, self.scoring())
        for batch, context in zip(batches, plans, strict=True):
            if context is not None:
                batch[CONTEXT] = Context(context)

    def add_reference(self, batch: dict[str, Any]) -> None:
        """Put the reference's log-probs into the batch, if the method has a reference and they are not there yet."""

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Evaluate without adding to the metrics."""
        kept, self._sums["eval"] = self._sums["eval"], MetricSums()
        try:
            yield
        finally:
            self._sums["eval"] = kept

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """The micro-batches of one optimiser step and their count over all of them and all processes, at least 1."""
        batches, counts, drawn = [], [], list(islice(epoch_iterator, num_batches))
        if drawn and self._fills_up():
            drawn[-1] = {**drawn[-1], FILLS_UP: True}
        for batch in drawn:
            own = self.take_batch(batch)
            counts.append(self.method.count(own).to(device) * (FILLS_UP not in batch))
            batches.append(self.handed_out(own, batch))
        count = sum(counts, torch.zeros((), dtype=torch.int64, device=device))
        if self.accelerator.num_processes > 1:
            count = self.accelerator.reduce(count, reduction="sum")
        assert isinstance(count, Tensor)
        self._unprepared = batches
        return batches, (count if len(self.method.units) > 1 else count.reshape(())).clamp(min=1)

    _unprepared: list[Any] | None = None

    def _fills_up(self) -> bool:
        """Whether the batch that was drawn last is its loader's last one, which has rows for other processes alone."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader:
            return False
        rounds = rounds_of(state.active_dataloader)
        return rounds is not None and self.args.process_index >= self.args.world_size - rounds.missing

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
        require_finite(self, "loss", loss.item())
        return loss

    _units_of_step: Tensor | int | None = None

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The gradient's norm; one that is not finite stops the run before the update (fp16 skips such steps)."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None and self.accelerator.scaler is None:
            require_finite(self, "the gradient's norm", float(norm))
        return norm

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
        fills_up = FILLS_UP in inputs
        if self.mode == "train" and self._token_counts is None and not fills_up:
            seen = count_sequence_tokens(self.method.learned(inputs))
            self._tokens_seen = self._tokens_seen + seen.to(self.args.device)
        own = self.method.count(inputs)
        step = own.clamp(min=1)
        if num_items_in_batch is not None:
            step = torch.as_tensor(num_items_in_batch).view(-1)
        found = self.outcome(model, inputs, step=step, with_outputs=return_outputs)
        loss = found.loss(self.method.units, own, step, router_weight=self.scorer.router_weight)
        if fills_up:
            loss = loss * 0  # with the collectives of the others, and a gradient of zeros
        else:
            self._record(found, own)
        if num_items_in_batch is not None and self.accelerator.num_processes > 1:
            loss = loss * self.accelerator.num_processes  # of which DDP, FSDP and DeepSpeed take the mean
        outputs = {"loss": loss, self._predictions: found.predictions, "labels": found.labels}
        known = {name: value for name, value in outputs.items() if value is not None}
        return (loss, known) if return_outputs else loss

    def _record(self, found: Outcome, own: Tensor) -> None:
        sums = self._sums[self.mode]
        sums.add_extremes(found.extremes)
        for terms in found.terms:
            sums.add_all(terms.metrics)
        if found.aux_loss is not None:
            sums.add("aux_loss", Weighted(found.aux_loss, torch.ones(())))
        if self.mode == "eval":
            units = self.method.units
            totals = found.totals(units, own, router_weight=self.scorer.router_weight)
            for unit, *part in zip(units, totals, own, strict=True):
                sums.add(LOSS_PARTS + unit, Weighted(*part))

    # ---- metrics

    @property
    def mode(self) -> str:
        """`train` or `eval`."""
        return "train" if self.model is not None and self.model.training else "eval"

    def _track_num_input_tokens(self, inputs: Mapping[str, Any]) -> None:
        """Count what `include_num_input_tokens_seen` asks for: tokens that are not padding are told by position, not by
        id.
        """
        if FILLS_UP in inputs and "input_ids" in inputs:
            inputs = {"input_ids": inputs["input_ids"][:, :0]}
        if self.args.include_num_input_tokens_seen != "non_padding" or "input_ids" not in inputs:
            super()._track_num_input_tokens(inputs)
            return
        seen = count_tokens(inputs).to(self.args.device).view(1)
        self.state.num_input_tokens_seen += int(self.accelerator.gather(seen).sum())  # type: ignore[union-attr]

    def statistics_due(self) -> bool:
        """Whether this step's costly statistics (entropy) will be logged; between logs they are not computed."""
        if self.mode == "eval":
            return True
        strategy, step = self.args.logging_strategy, self.state.global_step + 1
        if step == self.state.max_steps:  # for the summary
            return True
        if strategy == IntervalStrategy.STEPS:
            first = step == 1 and self.args.logging_first_step
            return first or not self.state.logging_steps or step % self.state.logging_steps == 0
        return strategy != IntervalStrategy.NO

    def num_tokens(self) -> float:
        """Real tokens trained on so far, over all processes."""
        seen = torch.as_tensor(self._tokens_seen, device=self.args.device)
        if self.accelerator.num_processes > 1:
            seen = self.accelerator.reduce(seen, reduction="sum")
        return float(seen)  # type: ignore[arg-type]

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
        """Of the whole run, also of what was trained before it was resumed, if the checkpoint says what that lost."""
        total: Any = self._total_loss_scalar  # what was not logged yet was summed by each process for itself
        if self.accelerator.num_processes > 1:
            total = torch.tensor(total, dtype=torch.float64, device=self.args.device)
            total = self.accelerator.reduce(total, reduction="mean").item()  # type: ignore[union-attr]
        return total / max(self.state.global_step - self._uncounted_steps, 1)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; see `transformers.Trainer.train`. Resuming is bit-exact.

        Raises: FileNotFoundError where there is nothing to resume from; CheckpointError where the checkpoint lost a
        part or is of another method, model or data, and where another run is active in `output_dir`.
        """
        with ExitStack() as stack:
            stack.callback(setattr, self, "_run", None)
            run = self._enter_run(stack, resume_from_checkpoint)
            output = super().train(run.checkpoint, *args, **kwargs)
        history = reversed(self.state.log_history)  # without a summary where an overridden `log` renames its metrics
        summary = next((logs for logs in history if "train_loss" in logs), {})
        metrics = {name: value for name, value in summary.items() if name != "step"}
        loss = self._mean_loss()
        metrics = {**output.metrics, "train_loss": loss, **metrics}
        return output._replace(training_loss=loss, metrics=metrics)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Raises TypeError: a trainer is one run."""
        raise TypeError("hyperparameter_search is not supported. Build a trainer for each trial and call train().")

    def _inner_training_loop(self, batch_size: int | None = None, **given: Any) -> Any:
        self._sums["train"].drain()  # of an earlier call
        self._tokens_seen, self._uncounted_steps = 0, 0
        self._goes_on_from = given.get("resume_from_checkpoint")
        check_lengths(self.accelerator, self.train_dataset, "train")
        return super()._inner_training_loop(batch_size=batch_size, **given)

    _goes_on_from: str | None = None  # a checkpoint of which only weights and optimiser are loaded yet

    def _run_epoch(self, *, epoch: int, **given: Any) -> None:
        """Train for an epoch; not when resuming from the run's last checkpoint, where the parent would train one more
        step.
        """
        if self._goes_on_from is not None and self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        if self.state.global_step == 0:
            check_best_metric(self)
        if hasattr(self._order, "set_epoch"):  # the parent does not find it where several processes skip seen rows
            self._order.set_epoch(epoch)  # type: ignore[union-attr]
        super()._run_epoch(epoch=epoch, **given)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self._goes_on_from is not None:  # nothing was left to train: its sums are still to be read
            self._load_rng_state(self._goes_on_from)
        # With a limit of 1 the parent removes the newest checkpoint here, if it is not the best.
        with holding(self.args, "save_total_limit", None):
            return super()._finalize_training(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate; see `transformers.Trainer.evaluate`."""
        with own_rng_states():  # also of callbacks
            return super().evaluate(*args, **kwargs)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Loss, and on request predictions and labels, of one evaluation batch; a row that only fills up does not
        count.
        """
        inputs = self._prepare_inputs(inputs)
        if fills_up := self._fills_up():
            inputs = {**inputs, FILLS_UP: True}
        self.gather_function = GatherRows(self.accelerator, fills_up=fills_up)
        batch = self._prepare_inputs(self.handed_out(self.take_batch(inputs), inputs))
        with torch.no_grad():
            if prediction_loss_only:
                return self.compute_loss(model, batch).detach(), None, None
            loss, outputs = self.compute_loss(model, batch, return_outputs=True)
            # Those of an overridden method may lack them.
            predictions, labels = (
                outputs.get(name) if isinstance(outputs, Mapping) else None for name in (self._predictions, "labels")
            )
            if predictions is None or labels is None:
                with self.unrecorded():
                    outcome = self.outcome(model, self.take_batch(batch), with_outputs=True)
                predictions, labels = outcome.predictions if predictions is None else predictions, outcome.labels
            return loss.detach(), predictions.detach(), labels

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
        with own_rng_states(), holding(self, "compute_metrics", returns_dict(self.compute_metrics)):
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        # A stream's, unless workers read it in processes of their own.
        rows = getattr(rounds_of(dataloader), "count", 0)
        output = output._replace(num_samples=rows or output.num_samples)
        assert output.metrics is not None
        names = self._sums["eval"].state()["sums"]
        means = self._sums["eval"].drain(self.accelerator)
        # The loss is the sum of its parts, each a mean over units of its own.
        parts = [means.pop(name) for name in list(means) if name.startswith(LOSS_PARTS)]
        means = self.method.derived({"loss": sum(parts), **means} if parts else means)
        if any(name.startswith(LOSS_PARTS) for name in names) and "loss" not in means:
            logger.warning("The %s set has no trained token: its loss is NaN.", metric_key_prefix)
            output.metrics[f"{metric_key_prefix}_loss"] = math.nan
        if means:
            means["num_tokens"] = self.num_tokens()
            own = {f"{metric_key_prefix}_{name}": value for name, value in means.items()}
            theirs = {name: v for name, v in output.metrics.items() if name != f"{metric_key_prefix}_loss"}
            output.metrics.update({**own, **theirs})  # what `compute_metrics` calls by the same name stays
        return output

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimiser, before the first step. Raises ValueError for a model without a trainable parameter."""
        parameters = (model or self.model).parameters()  # type: ignore[union-attr]
        trained = {parameter.dtype for parameter in parameters if parameter.requires_grad}
        if not trained:
            raise ValueError(
                f"every parameter of {type(self.model).__name__} is frozen (requires_grad=False), so nothing would be trained. "
                "Unfreeze some, or pass peft_config to train an adapter."
            )
        if self.args.device.type == "cpu" and torch.float16 in trained:
            raise ValueError(
                "the trained weights are float16, and this run is on a CPU. Load them in bfloat16 or float32."
            )
        optimizer = super().create_optimizer(model)
        if self.keeps_residuals:
            keep_residuals(optimizer)
        return optimizer

    @property
    def keeps_residuals(self) -> bool:
        """Whether the weights train in bfloat16 with residuals."""
        return getattr(self.args, "weights", None) is not None

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clip the gradients to `max_grad_norm`, in float32 also those of bfloat16 weights with residuals."""
        if not self.keeps_residuals:
            return super()._clip_grad_norm(model)
        return clip_gradients(self.optimizer, model.parameters(), self.args.max_grad_norm)

    # ---- the rows

    def get_train_dataloader(self) -> DataLoader:
        """The training batches; a stream starts again when it ends, so that every step is whole."""
        dataset: Any = self.train_dataset
        if is_streaming(dataset) and not isinstance(dataset, RepeatedStream):
            with holding(self, "train_dataset", RepeatedStream(dataset)):
                return super().get_train_dataloader()
        args, loader = self.args, super().get_train_dataloader()
        batches: Any = loader
        if args.dataloader_drop_last and has_length(batches) and not len(batches):
            raise ValueError(
                f"dataloader_drop_last=True drops all {self.num_examples(loader)} training rows: they do not fill a batch of "
                f"{args.train_batch_size * args.world_size} (over all processes). Set it to False, or lower "
                "per_device_train_batch_size."
            )
        return loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Batches of an evaluation set; rows that are not tokenised yet are prepared as those of the constructor."""
        given = eval_dataset if self._sets is None else self._sets.later(eval_dataset)
        is_own = given is None or isinstance(given, str) or given is self.eval_dataset
        # The parent keeps one loader with persistent workers, and takes it for any set that is given.
        persistent = self.args.dataloader_persistent_workers and is_own
        with holding(self.args, "dataloader_persistent_workers", persistent):
            return super().get_eval_dataloader(given)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Batches to predict on; rows that are not tokenised yet are prepared as those of the constructor."""
        return super().get_test_dataloader(test_dataset if self._sets is None else self._sets.later(test_dataset))

    def _get_dataloader(self, dataset: Any, *, is_training: bool = False, **given: Any) -> DataLoader:
        args = self.args
        if not is_training and is_streaming(dataset):  # hides a length of other rows (ConstantLengthDataset)
            place = {"process": args.process_index, "processes": args.world_size}
            dataset = StreamRounds(dataset, args.eval_batch_size, **place)
        # `dataloader_drop_last` is for training, whose epochs leave out other rows each time.
        with holding(args, "dataloader_drop_last", is_training and args.dataloader_drop_last):
            loader: Any = super()._get_dataloader(dataset, is_training=is_training, **given)
        shard, stream = loader.batch_sampler, loader.dataset
        if isinstance(shard, BatchSamplerShard):
            shard.batch_sampler, shard.even_batches = WholeRounds(shard.batch_sampler, args.world_size), False
        elif isinstance(stream, IterableDatasetShard) and isinstance(dataset, StreamRounds):
            stream.batch_size, stream.num_processes, stream.process_index = 1, 1, 0  # takes every row
        if is_training and args.dataloader_persistent_workers:
            # Workers are started once by a run, and again by one that goes on: neither may take from the process's own
            # stream.
            inner = getattr(loader, "base_dataloader", loader)  # accelerate's
            inner.generator = torch.Generator().manual_seed(self.order_seed)
        return loader

    _order: Sampler | None = None

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        dataset = self.train_dataset  # `train_dataset` has lost the columns that no batch needs
        if self.args.train_sampling_strategy != "group_by_length" or not isinstance(dataset, Dataset):
            self._order = super()._get_train_sampler(train_dataset)
            return self._order
        lengths = None if self._sets is None else self._sets.row_tokens(dataset)
        if self.args.length_column_name in dataset.column_names:
            lengths = list(dataset[self.args.length_column_name])
        elif "input_ids" in dataset.column_names:
            lengths = list_lengths(dataset, "input_ids").tolist()
        if lengths is None:
            raise ValueError(
                "train_sampling_strategy='group_by_length' needs the length of each row: its tokens, or a column "
                f"{self.args.length_column_name!r}, and prepared rows have {dataset.column_names}. Use 'random'."
            )
        rows = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        self._order = GroupedByLength(rows, lengths, seed=self.order_seed)
        return self._order

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler | None:
        """Rows, and so predictions, keep their order, also with `group_by_length`."""
        stays = not has_length(eval_dataset) or self.args.world_size > 1
        return None if stays else SequentialSampler(eval_dataset)

    @property
    def order_seed(self) -> int:
        """The seed of the order in which rows are visited."""
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    # ---- checkpoints

    def _enter_run(self, stack: ExitStack, resume: Any = None, *, alone: bool = True, saves: bool = False) -> Run:
        """Begin a run that lasts as long as `stack`: own its folder, check the checkpoint that it resumes from.

        `alone` refuses other runs in this process, `saves` is for one that saves whatever its `save_strategy`.
        """
        args, output_dir = self.args, Path(super()._get_output_dir(None))
        saves = saves or args.save_strategy != SaveStrategy.NO or args.enable_jit_checkpoint
        known = None if self._run is None else self._run.folder
        folder = known or output_dir / on_main(self.accelerator, run_folder_name)
        if saves and args.should_save:
            stack.enter_context(owned(folder, exclusive=alone))

        def begin() -> Run:
            model: Any = self.accelerator.unwrap_model(self.model)
            settings = {**args.to_dict(), "processes": args.world_size}
            facts = {} if not (saves or resume) else run_facts(
                method=self._name, config=model.config, adapters=getattr(model, "peft_config", {}),
                dataset=self.train_dataset, settings=settings,
            )  # fmt: skip
            if facts and (begun := run_date_of(self._tokenizer)):
                facts["date"] = begun
            return begin_run(folder, facts, args, resume=resume, alone=alone)

        self._run = on_main(self.accelerator, begin)
        self.newest_checkpoint = None if self._run.checkpoint is None else Path(self._run.checkpoint)
        return self._run

    _run: Run | None = None
    newest_checkpoint: Path | None = None
    """The last checkpoint that this run wrote, else the one that it resumed from."""

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write the checkpoint aside and rename it into place: a killed run leaves a whole one or none."""
        if self._run is None or "method" not in self._run.facts:  # no run, or one that was not to save
            with ExitStack() as stack:
                stack.callback(setattr, self, "_run", self._run)
                self._enter_run(stack, saves=True)
                self._save_checkpoint(model, trial)
            return
        run_dir = super()._get_output_dir(trial)
        writer = CheckpointWriter(self._run, run_dir, self.state, self.args, self.accelerator)
        self._checkpoint_writer = writer
        try:
            with writer.saving():
                super()._save_checkpoint(model, trial)
        finally:
            self._checkpoint_writer = None
        final = self.newest_checkpoint = writer.publish()
        if is_generated(Path(self.args.output_dir or ".")):
            self.create_model_card()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))

    _checkpoint_writer: CheckpointWriter | None = None

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.args.hub_strategy == HubStrategy.EVERY_SAVE:
            if self._is_pushing():  # the files of `output_dir`, which must stay as they are
                return
            # In `save_dtype`: a checkpoint's weights, which the parent would copy, are those that train.
            self.save_model(_internal_call=True)
            checkpoint_folder = os.devnull
        with holding(self, "args", unwritten(self.args)):
            super()._push_from_checkpoint(checkpoint_folder)

    def _is_pushing(self) -> bool:
        """Whether the main process still pushes an earlier model, for which this one is not pushed; the same on all
        processes.
        """
        push = None if self.args.hub_always_push else self.push_in_progress
        is_pushing = [push is not None and not push.is_done()]
        return broadcast_object_list(is_pushing)[0] if self.args.world_size > 1 else is_pushing[0]

    def _get_output_dir(self, trial: Any) -> str:
        if self._checkpoint_writer is not None:
            return str(self._checkpoint_writer.staging)
        return super()._get_output_dir(trial)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the model in `save_dtype`; a checkpoint as it is trained, with that dtype in its config for who loads
        it by name.
        """
        model: Any = self.accelerator.unwrap_model(self.model)
        args = unwritten(self.args)  # which are written, too
        dtype = save_dtype(model, getattr(args, "save_dtype", None))
        if dtype is not None and self._checkpoint_writer is None:
            state_dict = cast_state(model, model.state_dict() if state_dict is None else state_dict, dtype)
        with holding(self, "args", args):
            super()._save(output_dir, state_dict)
        if args.should_save:
            name_dtype(output_dir or str(args.output_dir), dtype)

    @contextmanager
    def _loading(self, folder: str, core: Any) -> Iterator[None]:
        """Weights that the parent could not place by name are loaded as `from_pretrained` does."""
        self._weights_are_renamed = False
        with naming_weights(folder):
            yield
            if self._weights_are_renamed:
                load_saved_weights(core, folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with self._loading(resume_from_checkpoint, self.scorer.core):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        with self._loading(str(self.state.best_model_checkpoint), self.scorer.core):
            super()._load_best_model()

    _weights_are_renamed = False

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """The parent loads a file's tensors by name, and only warns of those it cannot place.

        Raises: ValueError for a file that lacks tensors of the model.
        """
        self._weights_are_renamed = bool(load_result.unexpected_keys)
        if not self._weights_are_renamed:
            tied = getattr(self.model, "all_tied_weights_keys", None) or ()  # read under their other name
            missing = [key for key in load_result.missing_keys if key not in tied]
            if set(missing) - set(getattr(self.model, "_keys_to_ignore_on_save", None) or ()):
                raise ValueError(f"{len(missing)} tensors of the model are missing ({missing[0]}, ...)")
            super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        counts = {} if self._token_counts is None else {"tokens": self._token_counts.state()}
        save_progress(
            Path(output_dir),
            rank=self.args.process_index,
            state={
                "loss_since_log": self._tr_loss.item(),
                "loss_before_log": self._total_loss_scalar,
                "last_logged_step": self._globalstep_last_logged,
                "uncounted_steps": self._uncounted_steps,
                "processes": self.args.world_size,
                "tokens_seen": int(self._tokens_seen),
                "metrics": self._sums["train"].state(),
                "method": {**self.method.state(), **counts},
            },
        )
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, SavesState):
                callback.save_state(Path(output_dir))
        if self._moved_reference is not None:
            self._moved_reference.save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not starts_anew(self.args, "optimizer"):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if not starts_anew(self.args, "random_state"):
            super()._load_rng_state(checkpoint)
        self._goes_on_from = None
        if self._moved_reference is not None and checkpoint is not None:
            self._moved_reference.load(checkpoint)
        state = None
        if not starts_anew(self.args, "progress"):
            state = load_progress(checkpoint, rank=self.args.process_index, processes=self.args.world_size)
        if state is None:
            self._uncounted_steps = self.state.global_step if checkpoint else 0
            return
        self._uncounted_steps = state.get("uncounted_steps", 0)
        self._tr_loss.fill_(state["loss_since_log"])
        self._total_loss_scalar = state["loss_before_log"]
        self._globalstep_last_logged = state["last_logged_step"]
        self._tokens_seen = torch.tensor(state["tokens_seen"], device=self.args.device)
        self._sums["train"].load_state(state["metrics"], self.args.device)
        self.method.load_state(state.get("method", {}))
        if self._token_counts is not None:
            self._token_counts.load_state(state.get("method", {}).get("tokens", {}))

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


def require_finite(trainer: Trainer, what: str, value: float) -> None:
    """Raise FloatingPointError, with advice, for a number of the current step that is not finite."""
    if math.isfinite(value):
        return
    last = trainer.state.best_model_checkpoint or trainer.args.output_dir
    raise FloatingPointError(
        f"{what} must be finite, got {value} in optimiser step {trainer.state.global_step + 1}. No update was made with "
        f"it, and checkpoints under {last} are untouched. Lower learning_rate or max_grad_norm, check the data of "
        "this step, or train in bfloat16 or float32 if this run uses float16."
    )
