"""Data sets of prompts, made ready for a trainer that completes them."""

from __future__ import annotations

import logging
from typing import Any

from accelerate import PartialState
from datasets import Dataset, IterableDataset

from trl.data.image_rows import has_images, refuse_images
from trl.data.pipeline import STREAM_BATCH
from trl.data.prompts import PromptPreparation, prepare_prompts, prompt_tokenizer
from trl.data.validation import Place
from trl.generation.transformers.engine import context_length_of
from trl.models.parts import embedded_tokens
from trl.models.policy import Policy
from trl.rollouts.prompt_stream import PromptStream
from trl.trainer.grpo_config import GroupTraining

logger = logging.getLogger(__name__)

SHUFFLED_ROWS = 1000  # of a stream, among which the next one is drawn


class PromptSets:
    """Prepares the training and evaluation sets of a trainer.

    `room` is the longest completion in tokens, under the name that its config has (None: unknown); `settings` are further
    ones of `PromptPreparation`.
    """

    def __init__(self, policy: Policy, room: tuple[str, int | None], **settings: Any) -> None:
        self.policy, (self._name, self._room), self._settings = policy, room, settings
        self.window = context_length_of(policy.model)
        self.vocabulary = embedded_tokens(policy.model)

    def __call__(self, dataset: Any, name: str) -> Dataset:
        """A set with its prompts tokenised; a stream to evaluate on is read whole first.

        Raises: TypeError for a stream to train on and for what is no data set.
        """
        if isinstance(dataset, IterableDataset) and name != "train":
            dataset = _stored(dataset)
        if isinstance(dataset, list):
            _check_one_format(dataset, name)
            dataset = Dataset.from_list(dataset)
        if dataset is None:
            raise TypeError(
                f"{name} dataset is None, expected a datasets.Dataset with a column 'prompt'. Pass one to the trainer."
            )
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Dataset):
            raise TypeError(
                f"{name} dataset is of type {type(dataset).__name__}, expected a stored datasets.Dataset (GRPO and RLOO train on "
                "a datasets.IterableDataset, too). Load it without streaming, or take some rows of it with Dataset.from_list(list(...))."
            )
        with PartialState().main_process_first():
            prepared = self.prepared(dataset, self.settings(), name)
        self._warn_of_short_room(prepared, name)
        return prepared

    def settings(self) -> PromptPreparation:
        """How prompts are tokenised."""
        longest = None if self.window is None else self.window - 1
        return PromptPreparation(longest=longest, vocabulary=self.vocabulary, **self._settings)

    def stream(self, dataset: IterableDataset, *, shuffle_seed: int | None) -> PromptStream:
        """A training set that is read, and its prompts tokenised, as it goes on; the first rows are looked at now.

        `shuffle_seed` shuffles it in a buffer of `SHUFFLED_ROWS`, anew in each pass; None leaves it as it stands.
        Raises: ValueError for images, and what `__call__` raises for those rows.
        """
        if has_images(dataset):
            raise ValueError(
                "train dataset is a stream with a column of images, expected a stored datasets.Dataset: they are found again by the "
                "number of their row. Load it without streaming."
            )
        head = _stored(dataset.take(STREAM_BATCH))
        prepared = self(head, "train")
        read = prompt_tokenizer(head, self.policy.processing_class, self.settings(), name="train")
        rows = dataset.with_format(None)
        if shuffle_seed is not None:
            rows = rows.shuffle(seed=shuffle_seed, buffer_size=SHUFFLED_ROWS)
        return PromptStream(rows, head.column_names, prepared.column_names, read)

    def prepared(self, dataset: Dataset, settings: PromptPreparation, name: str) -> Dataset:
        """With a column of each prompt's tokens.

        Raises: ValueError for a set with images.
        """
        refuse_images(dataset, name=name)
        return prepare_prompts(dataset, self.policy.processing_class, settings, name=name)

    def every(self, given: Any) -> Any:
        """An evaluation set, or each of several by name; None for none."""
        if isinstance(given, dict):
            return {name: self(part, name) for name, part in given.items()}
        return None if given is None else self(given, "eval")

    def _warn_of_short_room(self, dataset: Dataset, name: str) -> None:
        if self.window is None or self._room is None:
            return
        room = self.window - self._room
        short = sum(len(ids) > room for ids in dataset["input_ids"])
        if short:
            logger.warning(
                "%s dataset: %d of %d prompts leave less than %s=%d tokens of the model's window of %d; what is said to them is "
                "cut short. Shorten them, or %s.",
                name,
                short,
                len(dataset),
                self._name,
                self._room,
                self.window,
                self._name,
            )


def training_prompts(sets: PromptSets, dataset: Any, args: GroupTraining) -> Dataset | PromptStream:
    """What a trainer of groups draws its prompts from.

    Raises: TypeError or ValueError for what is no data set of prompts, and for a stream with settings that need to know how
    many rows there are.
    """
    if not isinstance(dataset, IterableDataset):
        return sets(dataset, "train")
    if args.max_steps <= 0:
        raise ValueError(
            f"train dataset is a stream, whose length nobody knows, and max_steps is {args.max_steps}, expected the number of "
            "optimiser steps. Set max_steps, or load the data set without streaming."
        )
    if args.dynamic_sampling:
        raise ValueError(
            "train dataset is a stream, and dynamic_sampling=True draws from all rows at random, expected one of them. Load the "
            "data set without streaming, or leave dynamic_sampling out."
        )
    seed = args.seed if args.data_seed is None else args.data_seed
    return sets.stream(dataset, shuffle_seed=seed if args.shuffle_dataset else None)


def _stored(stream: IterableDataset) -> Dataset:
    """All rows of a stream, in memory."""
    return Dataset.from_list([dict(row) for row in stream.with_format(None)], features=stream.features)


def _check_one_format(rows: list[Any], name: str) -> None:
    """Raise TypeError for rows of which some have text and some messages: a stored data set has a column of one kind."""
    kinds = ["messages" if isinstance(row.get("prompt"), list) else "text" for row in rows]
    for index, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise TypeError(
                f"{Place(name, index, 'prompt')}: {kind}, expected {kinds[0]} as in row 0. Do not mix the standard and the "
                "conversational format; convert one into the other."
            )
