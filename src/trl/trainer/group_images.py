"""Prompts with images for the trainers that learn from groups of completions.

Pixels are not stored: every prompt has a key to its row of the data set, from which its images are read when a model
needs them. So checkpoints contain no pixels.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, cast

import torch
from datasets import Dataset, List, Value, concatenate_datasets
from datasets.features.features import FeatureType
from torch import Tensor

from trl.collators.images import PromptText, as_read, check_processor, image_tokens, prompt_inputs, prompt_tokens
from trl.data.formats import Row, RowDict, written
from trl.data.image_rows import ImagePrompts, check_image_prompts
from trl.data.pipeline import RowKind, json_columns
from trl.data.prompts import IMAGE_KEY, PROMPT_IDS, PromptPreparation, PromptSets, check_prompt_ids
from trl.generation.transformers.model_generate import MoreInputs
from trl.models.packed.layout import IGNORED, padded_rows
from trl.models.parts import causal_core
from trl.models.policy import Policy
from trl.models.setup import pad_token_id
from trl.rollouts.experience import Experience
from trl.rollouts.maker import Completed, RolloutMaker, Rows
from trl.trainer.images import check_image_token, check_parts

ROWS_KEPT = 64  # rows of the data set whose decoded images stay in memory
_SET = 2**32  # keys: number of the set times this, plus the row

ChangeImages = Callable[[int, int, list[Any]], list[Any]]
"""(row of the batch, key and images of its prompt) -> the images to use instead."""


def set_and_row(key: int) -> tuple[int, int]:
    """The number of a key's prepared set (0: the training set), and the row in it."""
    return divmod(key, _SET)


class PromptImages:
    """Finds the images of prompts by their keys, makes model inputs of them, and completes such prompts."""

    exact = True

    def __init__(self, policy: Policy) -> None:
        self.processor: Any = policy.processing_class
        self.pad = pad_token_id(policy.tokenizer)
        self.tokens = image_tokens(self.processor, causal_core(policy.model).config)
        self._prompts: dict[int, ImagePrompts] = {}
        self._sets: weakref.WeakValueDictionary[int, Dataset] = weakref.WeakValueDictionary()
        self._row = lru_cache(ROWS_KEPT)(self._read_row)

    def next_keys(self) -> int:
        """The first key of the next set."""
        return len(self._prompts) * _SET

    def add(self, dataset: Dataset, prompts: ImagePrompts) -> None:
        """Register a prepared set; only a weak reference to it is kept."""
        self._sets[len(self._prompts)] = dataset
        self._prompts[len(self._prompts)] = prompts

    def _read_row(self, key: int) -> tuple[str, list[Any]]:
        """A prompt's text with placeholders, and its images."""
        number, index = set_and_row(key)
        prompts, dataset = self._prompts[number], self._sets[number]
        stored = dataset[index]
        row = stored | {name: written(stored[name], kind) for name, kind in json_columns(dataset).items()}
        images = prompts.images(row, index)
        return prompts.text(row, index, images), images

    def model_inputs(
        self, prompts: Sequence[tuple[int, int]], ends: Sequence[int], width: int, change: ChangeImages | None = None
    ) -> dict[str, Tensor]:
        """The model's inputs besides tokens, for pairs of a key and a number of tokens; see `prompt_inputs`."""
        rows = []
        for row, (key, length) in enumerate(prompts):
            text, images = self._row(key)
            rows.append(PromptText(text, images if change is None else change(row, key, images), length))
        return prompt_inputs(self._prompts[set_and_row(prompts[0][0])[0]], rows, ends, width)

    def batch(self, experience: Experience, change: ChangeImages | None = None) -> dict[str, Any]:
        """Padded rows of prompts with images and completions, whose scored tokens are the completions', in order."""
        flat = experience.as_batch(prefix_sharing=False)
        rows = padded_rows(flat, pad_token_id=self.pad)
        ids = as_read(rows["input_ids"], rows["labels"] != IGNORED, self.tokens, pad=self.pad)
        lengths = experience.prompts.lengths.tolist()
        prompts = list(zip(experience.per_row[IMAGE_KEY].tolist(), lengths, strict=True))
        seen = self.model_inputs(prompts, lengths, ids.shape[1], change)
        return {**rows, "input_ids": ids, **seen, "rows": flat["rows"]}

    def __call__(self, maker: RolloutMaker, rows: Rows, *, streams: Sequence[int]) -> Completed:
        keys, prompts = list(rows[IMAGE_KEY]), rows[PROMPT_IDS]

        def inputs(requests: Sequence[int], width: int) -> dict[str, Tensor]:
            own = [(keys[request], len(prompts[request])) for request in requests]
            return self.model_inputs(own, [width] * len(own), width)

        more = MoreInputs(inputs, keys, self.tokens, blank=self.pad)
        found = maker.complete(prompts, streams=streams, more_inputs=more)
        return Completed(found.with_rows(**{IMAGE_KEY: torch.tensor(keys)}))


class ImagePromptSets(PromptSets):
    """Prepares data sets of prompts with images, which `images` finds by key.

    Raises: ImportError, TypeError or ValueError for models, processors and rows that do not fit.
    """

    def __init__(self, policy: Policy, settings: PromptPreparation, **limits: Any) -> None:
        super().__init__(policy.processing_class, settings, **limits)
        check_parts(policy)
        check_processor(policy.processing_class)
        self.images, self._config = PromptImages(policy), causal_core(policy.model).config

    def prepared(self, dataset: Dataset, name: str) -> Dataset:
        """With the tokens of each prompt, those of its images among them, and its key."""
        processor, settings = self.images.processor, self.settings
        prompts = check_image_prompts(dataset, processor, name=name, template_kwargs=settings.template_kwargs)
        kind = ImagePromptTokenizer(prompts, settings, name, self.images.next_keys())
        rows = dataset.with_format(None)
        tokens = cast(Dataset, kind.map(rows, num_proc=settings.num_proc))
        prepared = concatenate_datasets([rows, tokens], axis=1)  # images are not written a second time
        self.images.add(prepared, prompts)
        # The first prompt's tokens and images must belong to the model.
        ids, key = prepared[0][PROMPT_IDS], prepared[0][IMAGE_KEY]
        seen = self.images.model_inputs([(key, len(ids))], [len(ids)], len(ids))
        check_image_token({**seen, "input_ids": torch.tensor([ids])}, self._config, name)
        return prepared


@dataclass(frozen=True)
class ImagePromptTokenizer(RowKind):
    """Rows of prompts with images as `input_ids`, those of the images among them, and the key of each row."""

    counts = ()
    batch_rows: ClassVar[int] = 16  # their images are decoded together

    prompts: ImagePrompts
    settings: PromptPreparation
    dataset_name: str
    first_key: int

    @property
    def features(self) -> dict[str, FeatureType]:
        return {PROMPT_IDS: List(Value("int32")), IMAGE_KEY: Value("int64")}

    def rows(self, rows: Sequence[Row], indices: Sequence[int]) -> list[RowDict]:
        return [
            {PROMPT_IDS: self._ids(row, index), IMAGE_KEY: self.first_key + index}
            for row, index in zip(rows, indices, strict=True)
        ]

    def _ids(self, row: Row, index: int) -> list[int]:
        reader, keep, place = self.prompts, self.settings.keep, self.prompts.place(index, "prompt")
        images = reader.images(row, index)
        ids, is_image = prompt_tokens(reader, reader.text(row, index, images), images)
        if keep is not None and any(is_image[: max(len(ids) - keep, 0)]):
            raise ValueError(
                f"{place}: {len(ids)} tokens, of which {sum(is_image)} are its images', do not fit "
                f"max_prompt_length={keep}, and an image cannot lose tokens. Set max_prompt_length=None, raise it, or "
                "give smaller or fewer images."
            )
        kept = ids if keep is None else ids[-keep:]
        check_prompt_ids(kept, self.settings, place)
        return kept
