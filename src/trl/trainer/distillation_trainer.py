"""On-policy distillation: a student learns a teacher's distributions on its own completions of prompts."""

from copy import copy
from typing import Any, ClassVar

from transformers import TrainerCallback
from transformers.utils.quantization_config import QuantizationConfigMixin

from trl.legacy.interface import LegacyGroups
from trl.methods.distillation import DistillationMethod
from trl.models.peft import AdapterConfig
from trl.options.groups import names_checked
from trl.options.training import config_or_default
from trl.reporting.model_card import Paper
from trl.trainer.arguments import AnyDataset, AnyModel, EvalDatasets, Optimizers, Processor
from trl.trainer.distillation_config import DistillationConfig
from trl.trainer.group_setup import Tools
from trl.trainer.online_trainer import OnlineTrainer


class DistillationTrainer(LegacyGroups, OnlineTrainer):
    """Trainer of on-policy distillation: the student completes prompts and learns the teacher's distributions.

    Args:
        model: the student: a causal language model, a `PeftModel`, or a name or path.
        teacher_model: a model of the same tokenizer, or its name or path. None: the one that the config names, or, of
            an adapter that trains, its base.
        args: a `DistillationConfig`.
        train_dataset: rows with a `prompt` (text or messages) or tokenised, with `input_ids`. A stream needs
            `max_steps`.
        eval_dataset: the same kind of rows, or a dict of several sets by name.
        processing_class: the student's tokenizer, or its processor where prompts have images.
        quantization_config: how the student is quantised when it is loaded by name or path.
        peft_config: trains a new adapter of the student with these settings.
        tools: functions, sync or async, that the student may call; their outputs are not trained on.

    The loss is the mean over the completion tokens of an optimiser step, of all its micro-batches on all processes
    (arXiv:2306.13649, with lmbda = 1).

    Example:
        >>> trainer = DistillationTrainer(
        ...     "Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", DistillationConfig("student"), dataset
        ... )  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "distillation"]
    _name: ClassVar[str] = "on-policy distillation"
    _paper = Paper("On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes", "2306.13649")
    args: DistillationConfig
    method: DistillationMethod
    method_type = DistillationMethod
    config_type = DistillationConfig

    @names_checked
    def __init__(
        self, model: AnyModel, teacher_model: AnyModel | None = None, args: DistillationConfig | None = None,
        train_dataset: AnyDataset | None = None, eval_dataset: EvalDatasets | None = None,
        processing_class: Processor | None = None, callbacks: list[TrainerCallback] | None = None,
        optimizers: Optimizers = (None, None), quantization_config: QuantizationConfigMixin | None = None,
        peft_config: AdapterConfig = None, tools: Tools | None = None,
    ) -> None:  # fmt: skip
        args = config_or_default(args, self.config_type, self._tag_names[-1])  # type: ignore[assignment]
        assert args is not None
        if quantization_config is not None:
            kwargs: Any = args.model_init_kwargs or {}
            if "quantization_config" in kwargs:
                raise ValueError(
                    "quantization_config was passed to the trainer and is in model_init_kwargs. Set one of them."
                )
            args = copy(args)
            args.model_init_kwargs = {**kwargs, "quantization_config": quantization_config}
        super().__init__(
            model, None, args, train_dataset, eval_dataset, processing_class, callbacks=callbacks,
            optimizers=optimizers, peft_config=peft_config, tools=tools, teacher_model=teacher_model,
        )  # fmt: skip
