"""Types of the arguments that the constructors of trainers share."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

AnyDataset: TypeAlias = Dataset | IterableDataset
EvalDatasets: TypeAlias = AnyDataset | dict[str, AnyDataset]
AnyModel: TypeAlias = str | PreTrainedModel | nn.Module
Processor: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin
Collator: TypeAlias = Callable[[list[Any]], Any]
"""Makes a batch of some rows."""
ComputeMetrics: TypeAlias = Callable[[EvalPrediction], dict[str, Any]]
ModelInit: TypeAlias = Callable[[], PreTrainedModel]
Optimizers: TypeAlias = tuple[torch.optim.Optimizer | None, LRScheduler | None]
OptimizerClass: TypeAlias = tuple[type[torch.optim.Optimizer], dict[str, Any]]
PreprocessLogits: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Callbacks: TypeAlias = list[TrainerCallback]
FormattingFunction: TypeAlias = Callable[[dict[str, Any]], Any]


def initial_model(
    model: AnyModel | None, model_init: ModelInit | None, args: TrainingArguments | None
) -> AnyModel | None:  # fmt: skip
    """The model, or what `model_init` makes with the config's seed. Raises: ValueError for both."""
    if model_init is None:
        return model
    if model is not None:
        raise ValueError("model and model_init were both given, expected one. Leave out the other.")
    set_seed(42 if args is None else args.seed)
    return model_init()
