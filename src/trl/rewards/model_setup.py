"""Reward models of a trainer: the tokenizer that each reads with, and where its weights are."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from trl.models.loading import get_config_model_id
from trl.models.parts import causal_core
from trl.models.policy import Policy
from trl.models.reference import FrozenModel
from trl.rewards.source import RewardSources


def tokenizer_for(source: Any, given: Any, policy: Policy) -> Any:
    """The tokenizer of a reward model: the one given, None for the one saved with it, else the policy's."""
    if given is not None or not isinstance(source, nn.Module):
        return given
    saved = get_config_model_id(causal_core(source).config)
    has_files = any((Path(saved) / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json"))
    return None if saved and (has_files or not Path(saved).is_dir()) else policy.processing_class


def tokenizers_for(sources: list[Any], given: Any, policy: Policy) -> Any:
    """The tokenizer of each source: `given` is one for the only model or one for each; a wrong number of them is left as it is.

    Raises: ValueError for one tokenizer and several models.
    """
    if not isinstance(given, (list, tuple)):
        models = sum(isinstance(source, (nn.Module, str, PathLike)) for source in sources)
        if given is not None and models > 1:
            raise ValueError(
                f"reward_processing_classes is one tokenizer for {models} reward models, expected one for each: a tokenizer belongs "
                "to its model. Give a list with an entry for each reward function (None: the tokenizer saved with the model), or "
                "leave it out."
            )
        given = [given] * len(sources)
    if len(given) != len(sources):
        return given
    return [tokenizer_for(source, own, policy) for source, own in zip(sources, given, strict=True)]


def place_reward_models(rewards: RewardSources, accelerator: Any) -> None:
    """Bring reward models to the device, or shard them as the run shards the policy."""
    for source in rewards.models:
        frozen = FrozenModel(source.model, source.scorer)
        frozen.prepare(accelerator)
        source.model = frozen.model
