"""The data sets of supervised fine-tuning, checked and tokenised before the first step."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pyarrow.compute as pc
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from torch.utils.data import Dataset as TorchDataset

from trl.collators.language_modelling import DataCollatorForLanguageModeling
from trl.data.formats import column_names
from trl.data.image_rows import refuse_images
from trl.data.prepared_sets import DataSets
from trl.data.ragged import column_blocks, list_lengths
from trl.data.rendering import ProcessingClass, text_tokenizer
from trl.data.streaming import is_streaming
from trl.data.templates import get_training_chat_template
from trl.data.text import SFTPreparation, prepare_sft_dataset
from trl.data.token_rows import mask_columns
from trl.models.packed.layout import is_packed
from trl.models.parts import embedded_tokens
from trl.models.policy import Policy
from trl.models.setup import check_positions, table_of_positions
from trl.trainer.sft_config import SFTConfig

logger = logging.getLogger(__name__)

PREPARATION_KEYS = ("add_special_tokens", "skip_prepare_dataset", "untrained_rows")
PACKED_ROWS_TRIED = 16


class SFTDatasets(DataSets):
    """Tokenises data sets before the first step, each on the main process first."""

    keep_end: ClassVar[bool] = False  # of rows that are longer than max_length
    keep_columns: ClassVar[tuple[str, ...]] = ()  # beside the tokens

    def __init__(
        self, args: SFTConfig, policy: Policy, *, formatting_func: Callable[[dict[str, Any]], Any] | None
    ) -> None:
        self.args, self.formatting_func, self.model = args, formatting_func, policy.model
        given = policy.processing_class
        self.processing_class = for_training(given) if args.assistant_only_loss else given
        extra: dict[str, Any] = dict(args.dataset_kwargs or {})  # type: ignore[arg-type]
        unknown = sorted(set(extra) - set(PREPARATION_KEYS))
        if unknown:
            raise ValueError(
                f"dataset_kwargs has unknown keys {unknown}. Known are {', '.join(PREPARATION_KEYS)} "
                "(untrained_rows is 'report', 'error' or 'drop')."
            )
        self._extra = {("skip_prepare" if k == "skip_prepare_dataset" else k): v for k, v in extra.items()}

    def prepared(self, dataset: Any, name: str, *, is_training: bool = False) -> Any:
        args = self.args
        packing = args.packing if is_training or args.eval_packing is None else args.eval_packing
        if is_training and args.shuffle_dataset and isinstance(dataset, (Dataset, IterableDataset)):
            dataset = dataset.shuffle(seed=args.seed)
        return self._prepare(dataset, name, packing=packing)

    def is_prepared(self, dataset: Any) -> bool:
        is_empty, columns = isinstance(dataset, Dataset) and not len(dataset), column_names(dataset)
        is_packed = "seq_lengths" in columns and not {"position_ids", *mask_columns(columns)} & set(columns)
        return super().is_prepared(dataset) or bool(is_empty and columns) or is_packed

    def completes(self) -> bool:
        """Whether a model writes completions of the rows' prompts."""
        return False

    def rows(self, dataset: Dataset | IterableDataset) -> Dataset | IterableDataset:
        """The rows that are tokenised."""
        return dataset

    def _prepare(self, dataset: Any, name: str, *, packing: bool) -> Any:
        if not isinstance(dataset, (Dataset, IterableDataset)):
            return check_finished(dataset, name)
        args = self.args
        refuse_images(dataset, name=name)
        dataset = self.rows(dataset)
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
            keep_end=self.keep_end,
            keep_columns=self.keep_columns,
            vocab_size=embedded_tokens(self.model),
            prompts_alone=self.completes(),
            **self._extra,
        )
        with PartialState().main_process_first():
            prepared, report = prepare_sft_dataset(dataset, self.processing_class, settings)  # type: ignore[type-var]
        if not report.is_streaming:
            logger.info(report.summary())
        check_positions(self.model, sequence_lengths(prepared), dataset_name=name)
        table = table_of_positions(self.model) if report.is_streaming else None
        if table is not None and (args.max_length is None or args.max_length > table):
            raise ValueError(
                f"{name} dataset is a stream, max_length is {args.max_length} and the model has positions for {table} tokens. Set "
                f"max_length to at most {table}."
            )
        return prepared


def check_finished(dataset: TorchDataset, name: str) -> TorchDataset:
    """A torch data set, which must give finished rows (`ConstantLengthDataset` does).

    Raises: ValueError where its first row, if it can be looked at, has no tokens.
    """
    if is_streaming(dataset) or not len(dataset):  # type: ignore[arg-type]
        return dataset
    row = dataset[0]
    if "input_ids" not in row:
        raise ValueError(
            f"{name} dataset, row 0, has {sorted(row)}: a torch data set must give tokens ('input_ids'). Make a "
            "datasets.Dataset of its rows to have them tokenised."
        )
    return dataset


def sequence_lengths(dataset: Any) -> np.ndarray:
    """Tokens of each sequence of prepared rows, packed or not; none for a stream."""
    if not isinstance(dataset, Dataset) or "input_ids" not in dataset.column_names:
        return np.zeros(0, np.int64)
    if "seq_lengths" not in dataset.column_names:
        return list_lengths(dataset, "input_ids")
    flat: Any = pc.list_flatten  # type: ignore[attr-defined]
    return np.concatenate([flat(block).to_numpy() for block in column_blocks(dataset, "seq_lengths")])


def for_training(processing_class: ProcessingClass) -> ProcessingClass:
    """The tokenizer with a template that marks the assistant's tokens, where one of this family is known.

    Qwen 3's then keeps the `<think>` block of every turn, not of the last one only. The tokenizer that is saved keeps
    its own template.
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
    """Raise ValueError where a collator of the user's does not keep packed sequences apart."""
    is_ours = isinstance(collator, DataCollatorForLanguageModeling)
    is_packing = args.packing and args.packing_strategy == "bfd"
    if is_ours or not is_packing or not isinstance(dataset, (Dataset, IterableDataset)):
        return
    row = max(dataset.take(PACKED_ROWS_TRIED), key=lambda row: len(row["seq_lengths"]))
    batch, sequences = collator([row]), len(row["seq_lengths"])
    begun = int((batch["position_ids"] == 0).sum()) if is_packed(batch) else 0
    if "segment_table" not in batch and begun < sequences:
        raise ValueError(
            f"packing=True with packing_strategy='bfd' puts several sequences into a row, and the data_collator "
            f"{type(collator).__name__} gives no position_ids that keep them apart: they would see each other. "
            "Use DataCollatorForLanguageModeling(padding_free=True), or packing=False."
        )
