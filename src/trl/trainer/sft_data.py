"""The data sets of supervised fine-tuning, checked and tokenised before the first step."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

from accelerate import PartialState
from datasets import Dataset, IterableDataset

from trl.collators.language_modelling import DataCollatorForLanguageModeling
from trl.data.preparation import SFTPreparation, prepare_sft_dataset
from trl.data.rendering import ProcessingClass, text_tokenizer
from trl.data.templates import get_training_chat_template
from trl.models.layout import is_flat
from trl.trainer.sft_config import SFTConfig

logger = logging.getLogger(__name__)

PREPARATION_KEYS = ("add_special_tokens", "skip_prepare_dataset", "untrained_rows")


class SFTDatasets:
    """Prepares the training and evaluation sets of one trainer, each on the main process first."""

    def __init__(
        self,
        args: SFTConfig,
        processing_class: ProcessingClass,
        *,
        formatting_func: Callable[[dict[str, Any]], Any] | None,
        vocab_size: int | None,
    ) -> None:
        self.args, self.formatting_func, self.vocab_size = args, formatting_func, vocab_size
        self.processing_class = (
            for_training(processing_class) if args.assistant_only_loss else processing_class
        )
        extra: dict[str, Any] = dict(args.dataset_kwargs or {})  # type: ignore[arg-type]
        unknown = sorted(set(extra) - set(PREPARATION_KEYS))
        if unknown:
            raise ValueError(
                f"dataset_kwargs has unknown keys {unknown}. Known are {', '.join(PREPARATION_KEYS)} "
                "(untrained_rows is 'report', 'error' or 'drop')."
            )
        self._extra = {("skip_prepare" if k == "skip_prepare_dataset" else k): v for k, v in extra.items()}

    def train(self, dataset: Any) -> Any:
        """The training set: shuffled where the config says so, tokenised, packed or truncated."""
        if self.args.shuffle_dataset:
            dataset = dataset.shuffle(seed=self.args.seed)
        return self._prepare(dataset, "train", packing=self.args.packing)

    def evaluation(self, dataset: Any) -> Any:
        """The evaluation set, or several by name."""
        packing = self.args.packing if self.args.eval_packing is None else self.args.eval_packing
        if isinstance(dataset, dict):
            return {name: self._prepare(part, name, packing=packing) for name, part in dataset.items()}
        return self._prepare(dataset, "eval", packing=packing)

    def _prepare(self, dataset: Any, name: str, *, packing: bool) -> Any:
        if not isinstance(dataset, (Dataset, IterableDataset)):
            return dataset  # a torch data set gives finished rows (ConstantLengthDataset)
        args = self.args
        settings = SFTPreparation(
            text_field=args.dataset_text_field,
            max_length=args.max_length,
            packing=packing,
            packing_strategy=args.packing_strategy,
            completion_only_loss=args.completion_only_loss,
            assistant_only_loss=args.assistant_only_loss,
            formatting_func=self.formatting_func,
            num_proc=args.dataset_num_proc,
            dataset_name=name,
            vocab_size=self.vocab_size,
            **self._extra,
        )
        with PartialState().main_process_first():
            prepared, report = prepare_sft_dataset(dataset, self.processing_class, settings)  # type: ignore[type-var]
        if not report.is_streaming:
            logger.info(report.summary())
        return prepared


def for_training(processing_class: ProcessingClass) -> ProcessingClass:
    """The tokenizer with a template that marks the assistant's tokens, where a known one renders the same text.

    The tokenizer that is saved keeps its own template.
    """
    template = get_training_chat_template(text_tokenizer(processing_class))
    if template is None:
        return processing_class
    logger.info("The chat template is replaced in training by one that marks what the assistant wrote.")
    marked = copy.deepcopy(processing_class)
    for part in {id(marked): marked, id(text_tokenizer(marked)): text_tokenizer(marked)}.values():
        part.chat_template = template
    return marked


def check_collator(collator: Callable[..., Any], dataset: Any, args: SFTConfig) -> None:
    """A collator of the user's must keep packed sequences apart."""
    if not (args.packing and args.packing_strategy == "bfd") or isinstance(
        collator, DataCollatorForLanguageModeling
    ):
        return
    batch = collator([next(iter(dataset))])
    if not is_flat(batch):
        raise ValueError(
            f"packing=True with packing_strategy='bfd' puts several sequences into a row, and the data_collator "
            f"{type(collator).__name__} gives no position_ids that keep them apart: they would see each other. "
            "Use DataCollatorForLanguageModeling(padding_free=True), or packing=False."
        )
