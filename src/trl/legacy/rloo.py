"""The calls of `RLOOTrainer` from 0.9 to 0.21, on the trainer of today."""

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence, Sized
from typing import Any

from datasets import Dataset, IterableDataset
from torch import nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from trl.data.rendering import text_tokenizer
from trl.legacy import move_arguments
from trl.options.training import config_or_default
from trl.rewards.functions import FunctionSource, name_of
from trl.rewards.models import ModelSource
from trl.rollouts.schedule import batch_sizes, fill_in_sizes
from trl.trainer.rloo_config import RLOOConfig

Processor = PreTrainedTokenizerBase | ProcessorMixin

_ORDER = (
    "config", "processing_class", "policy", "ref_policy", "reward_model", "train_dataset", "data_collator",
    "eval_dataset", "optimizers", "callbacks",
)  # fmt: skip
_MOVED = ("model", "reward_funcs", "args", "processing_class", "ref_model")


def of_any_level(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that also takes the arguments of 0.9-0.21, by name or in their order: first the config."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        if args and isinstance(args[0], RLOOConfig):
            named = dict(zip(_ORDER, args, strict=False))
            if len(args) > len(_ORDER) or named.keys() & kwargs.keys():
                raise TypeError(f"RLOOTrainer(config, ...) takes {', '.join(_ORDER)}, each once.")
            args, kwargs = (), {**named, **kwargs}
        values = signature.bind(self, *args, **kwargs).arguments
        older = values.pop("older", {})
        values |= move_arguments(RLOOConfig, {name: values.get(name) for name in _MOVED}, older)
        config = config_or_default(values["args"], RLOOConfig, "rloo")
        tokenizer, dataset = values["processing_class"], values.get("train_dataset")
        config = values["args"] = _with_sizes_of_run(config, dataset, tokenizer, is_older_call="policy" in older)
        if older.get("reward_model") is not None:
            values["reward_funcs"] = _older_reward(older["reward_model"], tokenizer, config)
        if "ref_policy" in older and config.beta == 0:  # which had to be passed
            values["ref_model"] = None
        init(**values)

    return wrapped


def _with_sizes_of_run(
    args: RLOOConfig, dataset: Dataset | IterableDataset | None, processing_class: Processor | None, *,
    is_older_call: bool,
) -> RLOOConfig:  # fmt: skip
    """A copy with the run's sizes filled in; the same config without a setting or a call of 0.21."""
    if is_older_call and not args.is_older:
        args = dataclasses.replace(args, rloo_k=args.num_generations)
    if not args.is_older:
        return args
    args, sizes = copy.copy(args), args.rollout_sizes()
    if args.stop_token == "eos" and processing_class is not None:  # not the model's own end tokens
        end = text_tokenizer(processing_class).eos_token_id
        args.generation_kwargs = {"eos_token_id": end, **(args.generation_kwargs or {})}  # type: ignore[dict-item]
    fill_in_sizes(args, sizes, len(dataset) if isinstance(dataset, Sized) else 0)
    vars(args).update(batch_sizes(sizes))  # read by programs; no fields
    return args


def _older_reward(reward_model: Any, processing_class: Processor | None, args: RLOOConfig) -> Any:
    """The source of a `reward_model`: a classifier reads the policy's tokens, a function whole texts."""
    if processing_class is None or isinstance(reward_model, (list, tuple)):
        return reward_model
    tokenizer = text_tokenizer(processing_class)
    if isinstance(reward_model, (str, nn.Module)):
        at_once = args.local_rollout_forward_batch_size or args.per_device_train_batch_size
        return ModelSource(reward_model, read="ids", policy_tokenizer=tokenizer, batch_size=at_once)

    def of_texts(prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]], **_: Any) -> Any:
        rows = [[*prompt, *ids] for prompt, ids in zip(prompt_ids, completion_ids, strict=True)]
        return reward_model(tokenizer.batch_decode(rows, skip_special_tokens=True))

    return FunctionSource(of_texts, name=name_of(reward_model))
