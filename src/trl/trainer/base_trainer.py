"""What every trainer shares: one division per optimiser step, metrics with their counts, exact resume.

`BaseTrainer` adds to `transformers.Trainer` and replaces none of its loop. The order of a step: `get_batch_samples`
draws all micro-batches and counts what they train over all processes; each micro-batch is scored and contributes
`sum(values * weights) / count`; so the gradient does not depend on how the step was cut.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, Trainer
from transformers.trainer_utils import EvalLoopOutput, IntervalStrategy, SaveStrategy

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
)
from trl.checkpoints.wholeness import naming_weights
from trl.models.activation_offloading import get_act_offloading_ctx_manager
from trl.models.head_precision import tied_where_equal
from trl.models.loading import load_saved_weights
from trl.models.packed.layout import count_scored, count_sequence_tokens, count_tokens
from trl.models.scoring.causal import Scored, Scorer
from trl.models.scoring.head import ScoreOptions
from trl.models.scoring.values import PolicyValueScorer
from trl.reporting.metrics import MetricSums
from trl.reporting.model_card import card_of_trainer
from trl.tensors.reduce import Weighted
from trl.trainer.best_metric import check_best_metric, chosen_metric
from trl.trainer.callbacks.checkpoint_on_signal import at_step_ends
from trl.trainer.overrides import Overridable
from trl.trainer.row_loaders import RowLoaders
from trl.trainer.views import Views

logger = logging.getLogger(__name__)


class BaseTrainer(Views, Overridable, RowLoaders, Trainer):
    """`transformers.Trainer` with exact normalisation over the optimiser step, weighted metrics and exact resume.

    A method's trainer overrides `compute_loss` (through `self.score` and `self.scale`) and `count_units`.
    """

    _tag_names: ClassVar[list[str]] = ["trl"]
    _name: ClassVar[str] = "training"
    _paper: ClassVar[dict[str, str]] = {}
    evaluation_metrics: ClassVar[tuple[str, ...]] = ("loss",)  # that every evaluation has

    scorer: Scorer | PolicyValueScorer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        collator = kwargs.get("data_collator")
        if isinstance(collator, PreTrainedTokenizerBase):  # it can be called, too
            raise TypeError(
                f"data_collator is a tokenizer ({type(collator).__name__}), expected a function that makes batches of rows. "
                "Give a tokenizer as processing_class=."
            )
        self.check_overrides()
        self._sums = {"train": MetricSums(), "eval": MetricSums()}
        super().__init__(*args, **kwargs)
        chosen_metric(self)  # whose set must exist
        self.settle_views()
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

    _tokens_seen: Tensor | int = 0
    _uncounted_steps = 0
    _offloading: Callable[[], AbstractContextManager[Any]] = nullcontext

    def adopt(self) -> None:
        """Finish a trainer whose subclass calls `transformers.Trainer.__init__` in place of ours, before it trains or evaluates."""
        raise TypeError(
            f"{type(self).__name__}.__init__ did not call the constructor of its trainer. Call super().__init__(...)."
        )

    # ---- one optimiser step

    def take_batch(self, batch: Any) -> Any:
        """A batch in the form that this method works on; a user's own collator may make another."""
        return batch

    def handed_out(self, own: Any, given: Any) -> Any:
        """What `compute_loss` is given for a batch, which `take_batch` made from the collator's `given` one."""
        return own

    def prepare_step(self, batches: list[Any]) -> None:
        """Called with all micro-batches of an optimiser step before the first is trained on: for what a loss needs to
        know about the whole step."""

    def count_units(self, batch: Mapping[str, Any]) -> Tensor:
        """What a batch's loss is counted in (trained tokens, unless a method says otherwise): int64, a scalar or one
        number for each kind of unit.

        Raises: ValueError for a batch without labels.
        """
        if batch.get("labels") is None and "scored_target" not in batch:
            raise ValueError(
                f"a batch has {sorted(batch)}, expected 'labels' too (-100 where nothing is trained). Let the "
                "data_collator add them, or leave data_collator out."
            )
        return count_scored(batch)

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
        batches, counts = [], []
        for _ in range(num_batches):
            batch = next(epoch_iterator, None)
            if batch is None:
                break
            own = self.take_batch(batch)
            counts.append(self.count_units(own).to(device))
            batches.append(self.handed_out(own, batch))
        count = sum(counts, torch.zeros((), dtype=torch.int64, device=device))
        if self.accelerator.num_processes > 1:
            count = self.accelerator.reduce(count, reduction="sum")
        assert isinstance(count, Tensor)
        self._unprepared = batches
        return batches, count.clamp(min=1)

    _unprepared: list[Any] | None = None

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
        self._units_of_step, self.loss_is_scaled_for_ga = num_items_in_batch, False
        try:
            with self._offloading():
                loss = super().training_step(model, inputs, num_items_in_batch)
        finally:
            self._units_of_step = None
        self._require_finite("loss", loss.item())
        return loss

    _units_of_step: Tensor | int | None = None

    def units_of_step(self, given: Tensor | int | None) -> Tensor | int | None:
        """The step's count that `compute_loss` divides by, also where an override did not hand it on; None outside a step."""
        count = self._units_of_step if given is None else given
        self.loss_is_scaled_for_ga = count is not None
        return count

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The gradient's norm; one that is not finite stops the run before the update (fp16 skips such steps)."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None and self.accelerator.scaler is None:
            self._require_finite("the gradient's norm", float(norm))
        return norm

    def _require_finite(self, what: str, value: float) -> None:
        if math.isfinite(value):
            return
        last = self.state.best_model_checkpoint or self.args.output_dir
        raise FloatingPointError(
            f"{what} must be finite, got {value} in optimiser step {self.state.global_step + 1}. No update was made with "
            f"it, and checkpoints under {last} are untouched. Lower learning_rate or max_grad_norm, check the data of "
            "this step, or train in bfloat16 or float32 if this run uses float16."
        )

    def score(
        self, model: nn.Module, inputs: Mapping[str, Any], options: ScoreOptions | None = None
    ) -> Scored:
        """The scoring forward under this run's precision."""
        with self.accelerator.autocast():
            return self.scorer.score(model, inputs, options)

    def scale(self, loss: Tensor) -> Tensor:
        """Undo the mean that DDP, FSDP and DeepSpeed take over processes: our division is over all of them already."""
        return loss * self.accelerator.num_processes if self.accelerator.num_processes > 1 else loss

    # ---- metrics

    @property
    def mode(self) -> str:
        """`train` or `eval`."""
        return "train" if self.model is not None and self.model.training else "eval"

    def record(self, name: str, value: Weighted) -> None:
        """Add to a metric of the current mode, averaged by its own count when it is logged."""
        self._sums[self.mode].add(name, value)

    def count_seen(self, batch: Mapping[str, Any]) -> None:
        """Count the real tokens of a training batch's sequences (`num_tokens`), however they are laid out."""
        if self.mode == "train":
            self._tokens_seen = self._tokens_seen + count_sequence_tokens(batch).to(self.args.device)

    def _track_num_input_tokens(self, inputs: Mapping[str, Any]) -> None:
        """Count what `include_num_input_tokens_seen` asks for: tokens that are not padding are told by position, not by id."""
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
        if strategy == IntervalStrategy.NO:
            return False
        if strategy == IntervalStrategy.STEPS:
            first = step == 1 and self.args.logging_first_step
            return first or not self.state.logging_steps or step % self.state.logging_steps == 0
        return True

    def num_tokens(self) -> float:
        """Real tokens trained on so far, over all processes."""
        seen = torch.as_tensor(self._tokens_seen, device=self.args.device)
        if self.accelerator.num_processes > 1:
            seen = self.accelerator.reduce(seen, reduction="sum")
        return float(seen)  # type: ignore[arg-type]

    def derived_metrics(self, means: dict[str, float]) -> dict[str, float]:
        """The metrics to log, from the means of those recorded: for what is no mean itself."""
        return means

    def ends_window(self, logs: Mapping[str, float]) -> bool:
        """Whether these logs hold a training loss, or are the summary of a run with steps that were not logged yet."""
        if "train_loss" in logs:
            return self.state.global_step > self._globalstep_last_logged
        return "loss" in logs

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; a training loss and the summary at the end come with the metrics recorded since the last one."""
        if self.ends_window(logs):
            means = self.derived_metrics(self._sums["train"].drain(self.accelerator))
            logs = {**logs, **means, "num_tokens": self.num_tokens()}
        if "train_loss" in logs:
            logs["train_loss"] = self._mean_loss()
        super().log(logs, start_time)

    def _mean_loss(self) -> float:
        """Mean training loss of the whole run, also of what was trained before it was resumed.

        Left out are steps before a checkpoint that does not say what they lost. All processes must call it: what was
        not logged yet was summed by each for itself.
        """
        total: Any = self._total_loss_scalar
        if self.accelerator.num_processes > 1:
            total = torch.tensor(total, dtype=torch.float64, device=self.args.device)
            total = self.accelerator.reduce(total, reduction="mean").item()  # type: ignore[union-attr]
        return total / max(self.state.global_step - self._uncounted_steps, 1)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; see `transformers.Trainer.train`. Resuming is bit-exact.

        Raises: FileNotFoundError where there is nothing to resume from; CheckpointError where the checkpoint lost a part or
        is of another method, model or data, and where another run is active in `output_dir`.
        """
        if "_sums" not in vars(self):
            self.adopt()
        with ExitStack() as stack:
            stack.callback(setattr, self, "_run", None)
            run = self._enter_run(stack, resume_from_checkpoint)
            output = super().train(run.checkpoint, *args, **kwargs)
        loss = self._mean_loss()
        summary = next((logs for logs in reversed(self.state.log_history) if "train_loss" in logs), {})
        metrics = {name: value for name, value in summary.items() if name != "step"}
        return output._replace(training_loss=loss, metrics={**output.metrics, **metrics, "train_loss": loss})

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Raises TypeError: a trainer is one run."""
        raise TypeError(
            "hyperparameter_search is not supported. Build a trainer for each trial and call train()."
        )

    def _inner_training_loop(self, batch_size: int | None = None, **given: Any) -> Any:
        self._sums["train"].drain()  # of an earlier call
        self._tokens_seen, self._uncounted_steps = 0, 0
        self._goes_on_from = given.get("resume_from_checkpoint")
        return super()._inner_training_loop(batch_size=batch_size, **given)

    _goes_on_from: str | None = None  # a checkpoint of which only weights and optimiser are loaded yet

    def _run_epoch(self, **given: Any) -> None:
        """Train for an epoch; not where a run goes on from its last checkpoint, of which the parent would train a step more."""
        if self._goes_on_from is not None and self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        if self.state.global_step == 0:
            check_best_metric(self)
        super()._run_epoch(**given)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self._goes_on_from is not None:  # nothing was left to train: its sums are still to be read
            self._load_rng_state(self._goes_on_from)
        return super()._finalize_training(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate; see `transformers.Trainer.evaluate`."""
        if "_sums" not in vars(self):
            self.adopt()
        return super().evaluate(*args, **kwargs)

    def begin_evaluation(self, dataloader: DataLoader, prefix: str) -> None:
        """Called before the first batch of an evaluation, whose metrics are named with the prefix."""

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate; the loss is the mean over all scored units, however the batches were cut."""
        self.begin_evaluation(dataloader, metric_key_prefix)
        self._sums["eval"].drain()
        output = super().evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        output = output._replace(num_samples=self.streamed_rows(dataloader) or output.num_samples)
        assert output.metrics is not None
        names = self._sums["eval"].state()
        means = self.derived_metrics(self._sums["eval"].drain(self.accelerator))
        if "loss" in names and "loss" not in means:
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
        if not any(parameter.requires_grad for parameter in (model or self.model).parameters()):  # type: ignore[union-attr]
            raise ValueError(
                f"every parameter of {type(self.model).__name__} is frozen (requires_grad=False), so nothing would be trained. "
                "Unfreeze some, or pass peft_config to train an adapter."
            )
        return super().create_optimizer(model)

    # ---- checkpoints

    def _enter_run(
        self, stack: ExitStack, resume: Any = None, *, alone: bool = True, saves: bool = False
    ) -> Run:
        """Begin a run that lasts as long as `stack`: own its folder, check the checkpoint that it resumes from.

        `alone` refuses other runs in this process, `saves` is for one that saves whatever its `save_strategy`.
        """
        args, output_dir = self.args, Path(super()._get_output_dir(None))
        saves = saves or args.save_strategy != SaveStrategy.NO or args.enable_jit_checkpoint
        known = None if self._run is None else self._run.folder
        folder = known or output_dir / on_main(self.accelerator, run_folder_name)
        if saves and args.should_save:
            stack.enter_context(owned(folder, exclusive=alone))
        facts = self._facts if saves or resume else dict
        self._run = on_main(
            self.accelerator, lambda: begin_run(folder, facts(), args, resume=resume, alone=alone)
        )
        self.newest_checkpoint = None if self._run.checkpoint is None else Path(self._run.checkpoint)
        return self._run

    _run: Run | None = None
    newest_checkpoint: Path | None = None
    """The last checkpoint that this run wrote, else the one that it resumed from."""

    def _facts(self) -> dict[str, Any]:
        """What checkpoints say about this run."""
        model: Any = self.accelerator.unwrap_model(self.model)
        settings = {**self.args.to_dict(), "processes": self.args.world_size}
        return run_facts(
            method=self._name, config=model.config, adapters=getattr(model, "peft_config", {}),
            dataset=self.train_dataset, settings=settings,
        )  # fmt: skip

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write the checkpoint aside and rename it into place: a killed run leaves a whole one or none."""
        if self._run is None or not self._run.facts.get(
            "method"
        ):  # outside of a run, or in one that was not to save
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
        self.create_model_card()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))

    _checkpoint_writer: CheckpointWriter | None = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save the model; checkpoints keep a head that was untied apart, so that resuming is exact."""
        is_checkpoint = self._checkpoint_writer is not None or state_dict is not None
        with nullcontext() if is_checkpoint else tied_where_equal(self.model):
            super()._save(output_dir, state_dict)

    def _get_output_dir(self, trial: Any) -> str:
        if self._checkpoint_writer is not None:
            return str(self._checkpoint_writer.staging)
        return super()._get_output_dir(trial)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._weights_are_renamed = False
        with naming_weights(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            if self._weights_are_renamed:
                load_saved_weights(self.scorer.core, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._weights_are_renamed, best = False, self.state.best_model_checkpoint
        assert best is not None
        with naming_weights(best):
            super()._load_best_model()
            if self._weights_are_renamed:
                load_saved_weights(self.scorer.core, best)

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

    def method_state(self) -> dict[str, Any]:
        """What a method carries from one step to the next, as plain values: part of every checkpoint."""
        return {}

    def load_method_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `method_state` gave; nothing of it is in checkpoints that were made without it."""

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
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
                "method": self.method_state(),
            },
        )
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, SavesState):
                callback.save_state(Path(output_dir))

    def _starts_anew(self, part: str) -> bool:
        """Whether a part of the checkpoint is left out on resuming."""
        return part in (getattr(self.args, "resume_without", None) or ())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self._starts_anew("optimizer"):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if not self._starts_anew("random_state"):
            super()._load_rng_state(checkpoint)
        self._goes_on_from = None
        if self._starts_anew("progress"):
            self._uncounted_steps = self.state.global_step if checkpoint else 0
            return
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
        self.load_method_state(state.get("method", {}))

    # ---- the model card

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
