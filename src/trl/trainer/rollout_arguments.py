"""Training arguments of transformers that a trainer of its own rollouts does not read: said once, and put aside."""

from __future__ import annotations

from typing import Any

from transformers import TrainingArguments

from trl.trainer.foreign_settings import put_aside, settle

_LOADING = "prompts are tokenised before the first step, and no process loads batches"
_PREDICTIONS = "an evaluation measures completions, and hands no predictions to a compute_metrics"
_LABELS = "rollouts have no labels"
# Each with the reason, or what to do instead.
_WITHOUT_EFFECT = {
    "dataloader_num_workers": _LOADING,
    "dataloader_persistent_workers": _LOADING,
    "dataloader_prefetch_factor": _LOADING,
    "dataloader_multiprocessing_context": _LOADING,
    "dataloader_in_order": _LOADING,
    "dataloader_drop_last": "no prompt is dropped, for a batch of completions may begin in one epoch and end in the next",
    "train_sampling_strategy": "prompts are drawn by the seed alone; with GRPO and RLOO shuffle_dataset=False takes them as they stand",
    "ignore_data_skip": "a run that goes on knows its prompts by its step",
    "remove_unused_columns": "reward functions are handed every column",
    "label_names": _LABELS,
    "label_smoothing_factor": _LABELS,
    "prediction_loss_only": _PREDICTIONS,
    "include_for_metrics": _PREDICTIONS,
    "batch_eval_metrics": _PREDICTIONS,
    "eval_accumulation_steps": _PREDICTIONS,
    "eval_do_concat_batches": _PREDICTIONS,
    "eval_use_gather_object": _PREDICTIONS,
    "auto_find_batch_size": "a batch of completions is cut into the sizes that are given; where memory runs out, a smaller "
    "per_device_train_batch_size with more gradient_accumulation_steps gives the same gradients",
}
_DISTRIBUTION = {"split_batches": False, "dispatch_batches": None, "even_batches": True}


def put_aside_of_rollouts(args: TrainingArguments) -> None:
    """`put_aside` for trainers of their own rollouts, with what accelerate would do to loaders."""
    put_aside(args, _WITHOUT_EFFECT)
    config: Any = args.accelerator_config
    for name, default in _DISTRIBUTION.items():
        if config is not None:
            settle(config, name, default, "each process knows its rows by their number")
