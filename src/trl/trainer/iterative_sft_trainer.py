"""Supervised fine-tuning on rows that a program brings step by step: generated, filtered, corrected in between."""

import logging
import math
import sys
import time
import weakref
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_callback import ProgressCallback

from trl.checkpoints.runs import Run
from trl.collators.preference import Seq2SeqRowsCollator
from trl.data.rendering import text_tokenizer
from trl.data.step_inputs import Rows, StepRows
from trl.models.parts import embedded_tokens
from trl.models.setup import check_table, table_of_positions
from trl.models.switches import empty_cache, enable_gradient_checkpointing
from trl.reporting.run_lines import RunLines
from trl.trainer import arguments
from trl.trainer.iterative_sft_config import IterativeSFTConfig
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

logger = logging.getLogger(__name__)


class IterativeSFTTrainer(SFTTrainer):
    """Trainer of next-token prediction whose loop belongs to the user: each call of `step` brings its own rows.

    Args:
        model: a causal language model or an encoder-decoder, a `PeftModel`, or a name or path.
        args: an `IterativeSFTConfig`; a plain `TrainingArguments` is taken over into one.
        data_collator: makes batches of rows of `input_ids` and `labels`; by default that of `SFTTrainer`, or one for
            encoder-decoders.
        eval_dataset: rows as `SFTTrainer` takes them, or a dict of several by name; an encoder-decoder's are tokenised,
            with `labels`.
        processing_class: the tokenizer; by default the one saved with the model.
        optimizers: an optimiser and a schedule of your own.
        preprocess_logits_for_metrics: `(logits, labels) -> logits` before they are kept for `compute_metrics`.
        compute_metrics: `EvalPrediction -> dict`; it is given logits and labels of padded rows.
        peft_config: trains a new adapter with these settings instead of the model.

    The loss is that of `SFTTrainer`: the mean over the trained tokens of an optimiser step, however it is cut.

    Example:
        >>> from trl import IterativeSFTTrainer
        >>> trainer = IterativeSFTTrainer("Qwen/Qwen3-0.6B")  # doctest: +SKIP
        >>> trainer.step(texts=["The sky is blue.", "Seven apples are left."])  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "iterative-sft"]
    shares_tokens: ClassVar[bool] = False
    _name: ClassVar[str] = "Iterative SFT"
    _config_class: ClassVar[type[SFTConfig]] = IterativeSFTConfig

    def __init__(
        self, model: arguments.AnyModel | None = None, args: IterativeSFTConfig | TrainingArguments | None = None,
        data_collator: arguments.Collator | None = None, eval_dataset: arguments.EvalDatasets | None = None,
        processing_class: arguments.Processor | None = None, optimizers: arguments.Optimizers = (None, None),
        preprocess_logits_for_metrics: arguments.PreprocessLogits | None = None,
        compute_metrics: arguments.ComputeMetrics | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            model, args, data_collator=data_collator, eval_dataset=eval_dataset, processing_class=processing_class,
            optimizers=optimizers, preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            compute_metrics=compute_metrics, **kwargs,
        )  # fmt: skip
        assert isinstance(self.args, IterativeSFTConfig)
        self._has_begun = False
        self._table = table_of_positions(self.scorer.core)
        self._read = StepRows(
            text_tokenizer(self.processing_class),  # type: ignore[arg-type]
            self.scorer.core.config.is_encoder_decoder,
            self.args.max_length,
            self.args.truncation_mode == "keep_end",
        )

    # ---- what differs from SFTTrainer: encoder-decoders are trained too

    def check_model(self, core: PreTrainedModel) -> None:
        """Take decoders and encoder-decoders."""

    def make_collator(self, args: SFTConfig) -> arguments.Collator:
        """That of `SFTTrainer`, or one that puts the labels before the decoder."""
        if not self.scorer.core.config.is_encoder_decoder:
            return super().make_collator(args)
        if args.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor must be 0 for an encoder-decoder, got {args.label_smoothing_factor}. Leave it "
                "out."
            )
        return Seq2SeqRowsCollator(self.scorer.pad_token_id)

    # ---- the steps

    def step(
        self, input_ids: list[Tensor] | None = None, attention_mask: list[Tensor] | None = None,
        labels: list[Tensor] | None = None, texts: list[str] | None = None, texts_labels: list[str] | None = None,
    ) -> None:  # fmt: skip
        """Train once on some rows, in their order: tokens or texts, all this process has for this call.

        An optimiser step is made for every `per_device_train_batch_size * gradient_accumulation_steps` rows, and one
        for what is left. `labels` (-100 where nothing is trained) and `texts_labels` are the tokens themselves unless
        given; an encoder-decoder needs them. A text ends with the tokenizer's eos token, which is added where it is
        missing.

        Raises: ValueError or TypeError for rows that cannot be used, before anything is trained.
        """
        rows = self._read(
            input_ids=input_ids, attention_mask=attention_mask, labels=labels, texts=texts, texts_labels=texts_labels
        )  # fmt: skip
        self._check_rows(rows)
        size = self.args.per_device_train_batch_size
        batches = [self.data_collator(rows[at : at + size]) for at in range(0, len(rows), size)]
        updates = math.ceil(len(batches) / self.args.gradient_accumulation_steps)
        self._check_length(updates, len(batches))
        if not self._has_begun:
            self._begin(None)
        self._train_on(batches, updates)
        if self.args.optimize_device_cache:  # type: ignore[union-attr]
            empty_cache()

    def _train_on(self, batches: list[Any], updates: int) -> None:
        """The parent's epoch over these batches, once."""
        model, was_training = self.model, self.model.training  # type: ignore[union-attr]
        self.is_in_train = True
        self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
        try:
            self._run_epoch(
                model=self.model_wrapped,
                epoch=math.ceil(self.state.epoch or 0),  # calls so far
                train_dataloader=batches,
                steps_in_epoch=len(batches),
                num_update_steps_per_epoch=updates,
                trial=None,
                ignore_keys_for_eval=None,
                start_time=self._started,
                resume_from_checkpoint=None,
                epochs_trained=0,
                steps_trained_in_current_epoch=0,
            )
        finally:
            self.is_in_train = False
            model.train(was_training)  # type: ignore[union-attr]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Not the way to train here: raises TypeError."""
        raise TypeError("IterativeSFTTrainer has no data set to train on. Give rows to step, or use SFTTrainer.")

    def resume(self, checkpoint: str | bool = True) -> None:
        """Go on from a checkpoint (True: the last one in `output_dir`) before the first step of this process.

        Raises: ValueError after a step, FileNotFoundError where there is nothing to resume from.
        """
        if self._has_begun:
            raise ValueError("resume was called after a step, expected before the first. Make a new trainer.")
        folder = self._enter(checkpoint).checkpoint
        assert folder is not None
        if not self.is_deepspeed_enabled and not self.is_fsdp_enabled:
            self._load_from_checkpoint(folder)
        self._begin(folder)
        self._load_rng_state(folder)

    # ---- the beginning, as that of `Trainer.train`

    def _enter(self, checkpoint: str | bool | None) -> Run:
        """Begin a run that lasts as long as this trainer; other trainers of this process may use its folder."""
        with ExitStack() as stack:
            run = self.runs.enter(stack, self.args, resume=checkpoint, alone=False)
            self._ends = weakref.finalize(self, stack.pop_all().close)
        return run

    def _begin(self, checkpoint: str | None) -> None:
        """Optimiser, schedule, wrapping of the model, state and callbacks: once, before the first step."""
        if checkpoint is None:
            self._enter(None)
        # Without max_steps the schedule is made for so many steps that it never moves.
        length = self.args.max_steps if self.args.max_steps > 0 else sys.maxsize
        if self.args.max_steps <= 0:
            for callback in [*self.callback_handler.callbacks]:
                if isinstance(callback, ProgressCallback) and not isinstance(callback, RunLines):
                    self.remove_callback(callback)  # a bar without an end
        if self.args.gradient_checkpointing:
            enable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)  # pyright: ignore
        self._init_training_state(length, 1, 1, checkpoint, None)
        model, _ = self._prepare_for_training(length, None, checkpoint)
        self._started = time.time()
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._initial_global_step = self.state.global_step
        self._tr_loss = torch.tensor(0.0, device=self.args.device)
        self._total_loss_scalar, self._globalstep_last_logged = 0.0, self.state.global_step
        model.zero_grad()
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        self._has_begun = True

    def _check_length(self, updates: int, batches: int) -> None:
        """Refuse steps beyond `max_steps`, and processes with more batches than others: those would be waited for."""
        done = self.state.global_step
        if 0 < self.args.max_steps < done + updates:
            raise ValueError(
                f"this call makes {updates} optimiser steps after {done}, expected at most "
                f"max_steps={self.args.max_steps} in all. Set a larger max_steps, or give fewer rows."
            )
        counts = gather_object([batches])
        if len(set(counts)) > 1:
            raise ValueError(
                f"the processes have {counts} batches in this call, expected as many each. Give every process as many "
                "rows."
            )

    def _check_rows(self, rows: Rows) -> None:
        if self._table is not None:
            lengths = [max(len(row["input_ids"]), len(row["labels"])) for row in rows]
            check_table(lengths, self._table, dataset_name="the step's")
        assert self.model is not None
        known = embedded_tokens(self.model)
        for number, row in enumerate(rows):
            ids = row["input_ids"]
            if not (int(ids.min()) >= 0 and int(ids.max()) < known):
                raise ValueError(
                    f"row {number} has the tokens {int(ids.min())} to {int(ids.max())}, expected 0 to {known - 1}, "
                    "which the model knows. Use the tokenizer that belongs to it."
                )
