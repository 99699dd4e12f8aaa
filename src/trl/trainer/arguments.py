"""Types of the arguments that the constructors of trainers share."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

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
