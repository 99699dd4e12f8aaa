"""What a run counts: metrics as sums, tokens, the mean loss over all of its steps; and what stops it."""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, TrainOutput
from transformers.training_args import OptimizerNames

from trl.methods.method import ALONE, LOSS_PARTS, Batch, Method, Outcome
from trl.models.packed.layout import STEP_PART, count_tokens
from trl.models.residuals import ClipGradients, check_residuals
from trl.reporting.metrics import MetricSums, Processes
from trl.tensors.reduce import Weighted

logger = logging.getLogger("trl.trainer.base_trainer")


class RunMetrics:
    """Sums of a run and of its current evaluation, and the tokens that it has trained on; part of checkpoints."""

    tokens_seen: Tensor | int
    """Tokens that this process has trained on."""
    uncounted_steps: int
    """Steps whose loss a checkpoint did not know."""

    def __init__(self, processes: Processes, sums: dict[str, MetricSums]) -> None:
        self.accelerator, self.copies, self.sums = processes.accelerator, processes.copies, sums
        self.begin()

    def begin(self) -> None:
        """Forget an earlier run."""
        self.sums["train"].drain()
        self.tokens_seen, self.uncounted_steps = 0, 0

    def count_tokens(self, count: Tensor) -> None:
        """Count tokens that this process trains on."""
        self.tokens_seen = self.tokens_seen + count.to(self.accelerator.device)

    def num_tokens(self) -> float:
        """Tokens trained on so far, over all processes, which must all call it."""
        seen: Any = torch.as_tensor(self.tokens_seen, device=self.accelerator.device)
        return float(self.accelerator.reduce(seen, reduction="sum")) / self.copies  # type: ignore[arg-type]

    def mean_loss(self, trainer: Trainer) -> float:
        """Of the whole run, also of what was trained before it was resumed, if the checkpoint knows it."""
        total = trainer._total_loss_scalar  # of which each process knows for itself what was not logged yet
        if self.accelerator.num_processes > 1:
            sums: Any = torch.tensor(total, dtype=torch.float64, device=self.accelerator.device)
            total = self.accelerator.reduce(sums, reduction="mean").item()  # type: ignore[union-attr]
        return total / max(trainer.state.global_step - self.uncounted_steps, 1)

    def record(
        self, mode: str, outcome: Outcome, counts: Tensor, method: Method, *, router_weight: float,
        router_share: float | None = None,
    ) -> None:  # fmt: skip
        """Add what a batch measured; in an evaluation also its losses, by kind of unit."""
        sums = self.sums[mode]
        sums.add(extremes=outcome.extremes)
        for terms in outcome.terms:
            sums.add(terms.metrics)
        if outcome.aux_loss is not None:
            share = torch.tensor(1.0 if router_share is None else router_share)
            sums.add({"aux_loss": Weighted(share * outcome.aux_loss, share)})
        if mode == "eval":
            totals = outcome.totals(method.units, counts, router_weight=router_weight)
            for unit, total, count in zip(method.units, totals, counts, strict=True):
                sums.add({LOSS_PARTS + unit: Weighted(total, count)})

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Evaluate without adding to the metrics."""
        kept, self.sums["eval"] = self.sums["eval"], MetricSums()
        try:
            yield
        finally:
            self.sums["eval"] = kept

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        metrics = self.sums["train"].state()
        return {"uncounted_steps": self.uncounted_steps, "tokens_seen": int(self.tokens_seen), "metrics": metrics}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`."""
        device = self.accelerator.device
        self.uncounted_steps = state.get("uncounted_steps", 0)
        self.tokens_seen = torch.tensor(state["tokens_seen"], device=device)
        self.sums["train"].load_state(state["metrics"], device)
        for extremes in state.get("more_extremes", ()):
            self.sums["train"].add(extremes={name: torch.tensor(value) for name, value in extremes.items()})


class InputTokens(TrainerCallback):
    """Counts what `include_num_input_tokens_seen` asks for: tokens that are not padding, by position and not by id.

    transformers counts too, by id and with rows that only fill up; its number is replaced after each micro-batch.
    """

    def __init__(self, processes: Processes, counted: str | bool) -> None:
        self._accelerator, self._copies = processes
        self._counted, self._seen = counted, 0

    def add(self, batch: Batch) -> None:
        """Count a micro-batch; all processes must call it."""
        if "input_ids" not in batch or self._counted == "no":
            return
        count = torch.as_tensor(batch["input_ids"].numel()) if self._counted == "all" else count_tokens(batch)
        count = count.to(self._accelerator.device) * (not batch.get(STEP_PART, ALONE).fills_up)
        self._seen += int(self._accelerator.gather(count.view(1)).sum()) // self._copies  # type: ignore[union-attr]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Resume with the checkpoint's number."""
        self._seen = int(state.num_input_tokens_seen)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Replace the number, if tokens are counted."""
        if self._counted != "no":
            state.num_input_tokens_seen = self._seen

    on_step_end = on_substep_end


def ends_window(logs: Mapping[str, float], trainer: Trainer) -> bool:
    """Whether logs hold a training loss, or are the summary of a run with steps that were not logged yet."""
    if "train_loss" in logs:
        return trainer.state.global_step > trainer._globalstep_last_logged
    return "loss" in logs


def logs_step(args: TrainingArguments, state: TrainerState) -> bool:
    """Whether the metrics of the step that is next will be logged."""
    strategy, step = args.logging_strategy, state.global_step + 1
    if step == state.max_steps:  # for the summary
        return True
    if strategy == IntervalStrategy.STEPS:
        is_first = step == 1 and args.logging_first_step
        return is_first or not state.logging_steps or step % state.logging_steps == 0
    return strategy != IntervalStrategy.NO


def summary_of(output: TrainOutput, args: TrainingArguments, state: TrainerState, loss: float) -> TrainOutput:
    """What `train` returns: the mean loss, and the metrics that were logged last with it."""
    if args.load_best_model_at_end and state.best_global_step and not state.best_model_checkpoint:
        logger.warning(
            "The best model, of step %d, was not saved: the model is that of the last step. Set save_steps to "
            "eval_steps.",
            state.best_global_step,
        )
    # There is no summary where an overridden `log` renames its metrics.
    summary = next((logs for logs in reversed(state.log_history) if "train_loss" in logs), {})
    metrics = {name: value for name, value in summary.items() if name != "step"}
    return output._replace(training_loss=loss, metrics={**output.metrics, "train_loss": loss, **metrics})


def check_trained(model: nn.Module, device: torch.device) -> None:
    """Raise ValueError for a model without a trainable parameter, or with float16 ones on a CPU."""
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if not trained:
        raise ValueError(
            f"every parameter of {type(model).__name__} is frozen (requires_grad=False), so nothing would be trained. "
            "Unfreeze some, or pass peft_config to train an adapter."
        )
    if device.type == "cpu" and torch.float16 in trained:
        raise ValueError("the trained weights are float16, and this run is on a CPU. Load them in bfloat16 or float32.")


def watch_gradients(trainer: Trainer) -> None:
    """Stop a run whose gradient's norm is not finite; clip gradients of weights with residuals in float32."""
    accelerator, args = trainer.accelerator, trainer.args
    has_residuals = getattr(args, "weights", None) is not None
    if has_residuals:
        check_residuals(accelerator, OptimizerNames(args.optim).value)

    def check(norm: float) -> None:
        require_finite("the gradient's norm", norm, trainer.args, trainer.state)

    optimizer = (lambda: trainer.optimizer) if has_residuals else None
    accelerator.clip_grad_norm_ = ClipGradients(accelerator, check, optimizer)  # type: ignore[method-assign]


def require_finite(name: str, value: float, args: TrainingArguments, state: TrainerState) -> None:
    """Raise FloatingPointError, with advice, for a number of the current step that is not finite."""
    if math.isfinite(value):
        return
    raise FloatingPointError(
        f"{name} must be finite, got {value} in optimiser step {state.global_step + 1}. No update was made with it, "
        f"and checkpoints under {args.output_dir} are untouched. Lower learning_rate or "
        "max_grad_norm, check the data of this step, or train in bfloat16 or float32 if this run uses float16."
    )
