"""Data sets of prompts, made ready for a trainer that completes them."""

from __future__ import annotations

import logging
from typing import Any

from accelerate import PartialState
from datasets import Dataset, IterableDataset

from trl.data.prompts import PromptPreparation, prepare_prompts
from trl.data.validation import Place
from trl.generation.transformers_engine import context_window
from trl.models.parts import embedded_tokens
from trl.trainer.policy import Policy
from trl.trainer.sft_images import refuse_images

logger = logging.getLogger(__name__)


class PromptSets:
    """Prepares the training and evaluation sets of a trainer.

    `room` is the longest completion in tokens, under the name that its config has (None: unknown); `settings` are further
    ones of `PromptPreparation`.
    """

    def __init__(self, policy: Policy, room: tuple[str, int | None], **settings: Any) -> None:
        self.policy, (self._name, self._room), self._settings = policy, room, settings
        self.window = context_window(policy.model)
        self.vocabulary = embedded_tokens(policy.model)

    def __call__(self, dataset: Any, name: str) -> Dataset:
        """A set with its prompts tokenised.

        Raises: TypeError for a stream and for what is no data set.
        """
        if isinstance(dataset, list):
            _check_one_format(dataset, name)
            dataset = Dataset.from_list(dataset)
        if dataset is None:
            raise TypeError(
                f"{name} dataset is None, expected a datasets.Dataset with a column 'prompt'. Pass one to the trainer."
            )
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Dataset):
            raise TypeError(
                f"{name} dataset is of type {type(dataset).__name__}, expected a stored datasets.Dataset: prompts are drawn in "
                "random order. Load it without streaming, or take some rows of it with Dataset.from_list(list(...))."
            )
        settings = PromptPreparation(
            longest=None if self.window is None else self.window - 1,
            vocabulary=self.vocabulary,
            **self._settings,
        )
        with PartialState().main_process_first():
            prepared = self.prepared(dataset, settings, name)
        self._warn_of_short_room(prepared, name)
        return prepared

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


def _check_one_format(rows: list[Any], name: str) -> None:
    """Raise TypeError for rows of which some have text and some messages: a stored data set has a column of one kind."""
    kinds = ["messages" if isinstance(row.get("prompt"), list) else "text" for row in rows]
    for index, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise TypeError(
                f"{Place(name, index, 'prompt')}: {kind}, expected {kinds[0]} as in row 0. Do not mix the standard and the "
                "conversational format; convert one into the other."
            )
