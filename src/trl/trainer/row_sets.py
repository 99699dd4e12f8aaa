"""The data sets of trainers: prepared with the settings of a config, for a policy."""

import copy
import logging
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

from datasets import Dataset, IterableDataset
from torch import Tensor, nn

from trl.collators.language_modelling import DataCollatorForLanguageModeling
from trl.data.formats import Row, column_names
from trl.data.pipeline import Preparation
from trl.data.preference import PreferencePreparation
from trl.data.prepared_sets import PreparedSets, RowSet
from trl.data.rendering import Fields, ProcessingClass, text_tokenizer
from trl.data.streaming import is_streaming
from trl.data.templates import get_training_chat_template
from trl.data.text import SFTPreparation
from trl.models.packed.layout import is_packed
from trl.models.parts import embedded_tokens
from trl.models.policy import Policy
from trl.models.setup import check_positions, table_of_positions
from trl.tensors.padding import IGNORED
from trl.trainer.arguments import Collator, FormattingFunction
from trl.trainer.sft_config import SFTConfig

logger = logging.getLogger(__name__)

AnySets = TypeVar("AnySets", bound=PreparedSets)
AnySFTSets = TypeVar("AnySFTSets", bound="SFTSets")
PREPARATION_KEYS = ("add_special_tokens", "skip_prepare_dataset", "untrained_rows")
ROWS_TRIED = 16  # with a collator of the user's
LOSS_MASKS = ("completion_mask", "assistant_masks")


def row_sets(
    kind: type[Preparation], args: Any, policy: Policy, sets: type[AnySets] = PreparedSets, *,
    training: Fields | None = None, **settings: Any,
) -> AnySets:  # fmt: skip
    """The data sets of a trainer: each setting of `kind` is among `settings`, or the field of `args` of that name.

    `training`: those that are others for the training set.
    """
    values = {item.name: getattr(args, item.name) for item in fields(kind) if hasattr(args, item.name)}
    values |= {"num_proc": args.dataset_num_proc, "vocab_size": embedded_tokens(policy.model), **settings}
    check_lengths, train = partial(check_positions, policy.model), None if training is None else {**values, **training}
    return sets(kind(**values), policy.processing_class, check_lengths, None if train is None else kind(**train))


def pair_sets(
    args: Any, policy: Policy, kind: type[PreferencePreparation] = PreferencePreparation, **settings: Any
) -> PreparedSets:
    """The data sets of a trainer of prompts and completions."""
    encodes = bool(policy.scorer.core.config.is_encoder_decoder)
    limit = args.prompt_limit(is_encoder_decoder=encodes)
    return row_sets(kind, args, policy, max_prompt_length=limit, is_encoder_decoder=encodes, **settings)


def sft_sets(
    args: SFTConfig, policy: Policy, formatting_func: FormattingFunction | None, sets: type[AnySFTSets], **settings: Any
) -> AnySFTSets:
    """The data sets of supervised fine-tuning; `settings` are further ones of `SFTPreparation`."""
    options: dict[str, Any] = dict(args.dataset_kwargs or {})  # type: ignore[arg-type]
    if unknown := sorted(set(options) - set(PREPARATION_KEYS)):
        raise ValueError(
            f"dataset_kwargs has unknown keys {unknown}. Known are {', '.join(PREPARATION_KEYS)} "
            "(untrained_rows is 'report', 'error' or 'drop')."
        )
    if args.assistant_only_loss:
        policy = policy._replace(processing_class=for_training(policy.processing_class))
    options = {name.removesuffix("_dataset"): value for name, value in options.items()}  # skip_prepare_dataset
    packing = args.packing if args.eval_packing is None else args.eval_packing
    made = row_sets(
        SFTPreparation, args, policy, sets, training={"packing": args.packing}, text_field=args.dataset_text_field,
        packing=packing, formatting_func=formatting_func, **options, **settings,
    )  # fmt: skip
    made.model, made.shuffle_seed = policy.model, args.seed if args.shuffle_dataset else None
    return made


class SFTSets(PreparedSets):
    """The data sets of supervised fine-tuning: also torch ones, of prepared rows."""

    settings: SFTPreparation
    model: nn.Module

    def prepared(self, dataset: RowSet, name: str, *, is_training: bool = False) -> RowSet:
        """Raises: ValueError for a stream that may hold rows longer than the model's table of positions, for a torch
        data set whose first row, if it can be looked at, has no tokens.
        """
        length, is_stream = self.settings.max_length, isinstance(dataset, IterableDataset)
        table = table_of_positions(self.model) if is_stream and not self.settings.skip_prepare else None
        prepared = super().prepared(dataset, name, is_training=is_training)
        if table is not None and (length is None or length > table):
            raise ValueError(
                f"{name} dataset is a stream, max_length is {length} and the model has positions for {table} tokens. "
                f"Set max_length to at most {table}."
            )
        if not isinstance(dataset, (Dataset, IterableDataset)) and not is_streaming(dataset) and len(dataset):  # type: ignore[arg-type]
            row = dataset[0]
            if "input_ids" not in row:
                raise ValueError(
                    f"{name} dataset, row 0, has {sorted(row)}: a torch data set must give tokens ('input_ids'). Make "
                    "a datasets.Dataset of its rows to have them tokenised."
                )
        return prepared


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


def check_collator(collator: Collator, dataset: object, args: SFTConfig, columns: Sequence[str]) -> None:
    """Raise ValueError where a collator of the user's does not keep packed sequences apart, or trains masked tokens.

    `columns`: those that it is given in training.
    """
    if isinstance(collator, DataCollatorForLanguageModeling) or not isinstance(dataset, (Dataset, IterableDataset)):
        return
    is_packing, masks = args.packing and args.packing_strategy == "bfd", set(LOSS_MASKS) & set(column_names(dataset))
    if not (is_packing or masks):
        return
    stored = dataset.with_format(None) if isinstance(dataset, Dataset) else dataset
    rows = [{n: v for n, v in dict(row).items() if n in columns and v is not None} for row in stored.take(ROWS_TRIED)]
    if masked := [row for row in rows if any(0 in row.get(name, ()) for name in masks)]:
        _check_masks(collator, masked[0], args)
    if not is_packing:
        return
    row = max(rows, key=lambda row: len(row["seq_lengths"]))
    batch, sequences = collator([dict(row)]), len(row["seq_lengths"])
    begun = int((batch["position_ids"] == 0).sum()) if is_packed(batch) else 0
    if "segment_table" not in batch and begun < sequences:
        raise ValueError(
            f"packing=True with packing_strategy='bfd' puts several sequences into a row, and the data_collator "
            f"{type(collator).__name__} gives no position_ids that keep them apart: they would see each other. "
            "Use DataCollatorForLanguageModeling(padding_free=True), or packing=False."
        )


def _check_masks(collator: Collator, row: Row, args: SFTConfig) -> None:
    """Of a batch of one row, as often as a batch of training has rows."""
    expected = DataCollatorForLanguageModeling(0, completion_only_loss=args.completion_only_loss is not False)
    batches = (make([dict(row) for _ in range(args.train_batch_size)]) for make in (collator, expected))
    labels, ours = (batch.get("labels") for batch in batches)
    if not isinstance(labels, Tensor) or labels.shape != ours.shape or not (labels != IGNORED)[ours == IGNORED].any():
        return
    names = " and ".join(name for name in LOSS_MASKS if name in row)
    raise ValueError(
        f"the data_collator {type(collator).__name__} trains tokens that the rows' {names} leaves out. Leave "
        "data_collator out, or set completion_only_loss=False and assistant_only_loss=False."
    )
