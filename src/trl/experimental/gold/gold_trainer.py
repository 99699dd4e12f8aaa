"""GOLD: distillation from a teacher with another tokenizer, on data or on the student's own completions."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, ClassVar

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from trl._lazy import attach
from trl.data.rendering import text_tokenizer
from trl.data.text import PROMPT_ALONE
from trl.experimental.gold.gold_config import GOLDConfig
from trl.experimental.gold.gold_data import COLUMNS, PROMPTS_ALONE, THEIRS, GOLDSets, PairedCollator, Pairing
from trl.experimental.gold.gold_method import ON_POLICY, GOLDMethod, SameTokensMethod
from trl.experimental.gold.methods import print_prompt_completions_sample_uld
from trl.generation.engine import Generated, Sampling
from trl.generation.transformers.engine import without_wrappers
from trl.generation.vllm.server_engine import served_policy
from trl.models.loading import get_config_model_id, load_processing_class
from trl.models.packed.layout import TEACHER_BATCH
from trl.models.parts import causal_core
from trl.models.peft import AdapterConfig
from trl.models.policy import Policy, make_scorer
from trl.models.reference import FrozenModel
from trl.models.setup import pad_token_id
from trl.models.teacher import FrozenTeacher, Teacher, load_teacher
from trl.reporting.model_card import Paper
from trl.trainer.arguments import AnyDataset, EvalDatasets, FormattingFunction, Optimizers, Processor
from trl.trainer.gkd_trainer import AnyTeacher, GKDSets, GKDTrainer, MicroBatch, Writer, completed, gkd_sets, prompts_of
from trl.trainer.group_setup import check_engine, engine_of, sampling_of
from trl.trainer.loaders import order_seed

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere
Collator = Callable[[list[Any]], dict[str, Any]]


class GOLDTrainer(GKDTrainer):
    """Trainer of a student that learns from a teacher with another tokenizer.

    Args:
        model: the student: a causal language model, or a name or path.
        teacher_model: the teacher: a causal language model, or a name or path.
        args: a `GOLDConfig`. Without `use_uld_loss` the loss is that of `GKDTrainer`, for a teacher of the same
            tokenizer.
        train_dataset: rows of `messages`, whose last turn is the completion, or of prompt and completion, as texts or
            messages.

    The other arguments are those of `SFTTrainer`. Each side reads a row with its own tokenizer and chat template. The
    loss is the mean over all spans of tokens with the same bytes of an optimiser step.

    Example:
        >>> from datasets import load_dataset
        >>> trainer = GOLDTrainer(
        ...     "Qwen/Qwen3-0.6B",
        ...     teacher_model="HuggingFaceTB/SmolLM3-3B",
        ...     args=GOLDConfig("my-model", use_uld_loss=True, uld_use_hybrid_loss=True),
        ...     train_dataset=load_dataset("trl-lib/chatbot_arena_completions", split="train"),
        ... )  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "gold"]
    shares_tokens: ClassVar[bool] = False
    _name: ClassVar[str] = "GOLD"
    _paper = Paper("Towards Cross-Tokenizer Distillation: the Universal Logit Distillation Loss for LLMs", "2402.12030")
    _config_class: ClassVar[type[GOLDConfig]] = GOLDConfig
    _columns = (*GKDTrainer._columns, *COLUMNS, *PROMPTS_ALONE)
    args: GOLDConfig
    teacher_tokenizer: PreTrainedTokenizerBase | None = None
    pairing: Pairing | None = None

    def __init__(
        self, model: str | PreTrainedModel | nn.Module | None = None,
        teacher_model: str | PreTrainedModel | nn.Module | None = None, args: GOLDConfig | None = None,
        data_collator: Collator | None = None, train_dataset: AnyDataset | None = None,
        eval_dataset: EvalDatasets | None = None,
        processing_class: Processor | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: Optimizers = (None, None),
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        peft_config: AdapterConfig = None, **older: Any,
    ) -> None:  # fmt: skip
        if getattr(args, "use_uld_loss", False):
            if data_collator is not None:
                raise ValueError(
                    "data_collator was given with use_uld_loss=True, whose batches hold the tokens of both sides. "
                    "Leave it out."
                )
            self.teacher_tokenizer = _tokenizer_of(args, teacher_model)
        if isinstance(model, str) and getattr(args, "student_model_revision", "main") != "main":
            config: Any = copy(args)
            args = config
            config.model_init_kwargs = {"revision": config.student_model_revision, **(config.model_init_kwargs or {})}
        super().__init__(
            model, teacher_model, args, data_collator, train_dataset, eval_dataset, processing_class,
            compute_metrics=compute_metrics, callbacks=callbacks, optimizers=optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics, peft_config=peft_config, **older,
        )  # fmt: skip
        if self.pairing is not None:
            assert isinstance(self.teacher, FrozenTeacher)
            sizes = self.scorer.vocabulary, self.teacher.reference.scorer.vocabulary
            for name, known, size in zip(("student", "teacher"), self.pairing.known, sizes, strict=True):
                if len(known) > size:
                    raise ValueError(
                        f"the {name}'s tokenizer has {len(known)} tokens, its model {size} logits, expected at least "
                        "as many. Pass the tokenizer that belongs to the model."
                    )
            self.method = GOLDMethod(self.args, self.pairing, sizes)
        else:
            self.method = SameTokensMethod(self.args)

    def make_sets(self, args: GOLDConfig, policy: Policy, formatting_func: FormattingFunction | None) -> GKDSets:
        """The data sets, which a teacher with another tokenizer reads too."""
        if self.teacher_tokenizer is None:
            return gkd_sets(args, policy, formatting_func, GKDSets)
        if formatting_func is not None:
            raise TypeError(
                "formatting_func was given with use_uld_loss=True, expected rows of texts or messages. Leave it out."
            )
        sets = gkd_sets(args, policy, None, GOLDSets)
        sets.pairing = self.pairing = Pairing.of(policy.tokenizer, self.teacher_tokenizer, args)
        return sets

    def make_collator(self, args: GOLDConfig) -> Collator:
        """Batches of both sides."""
        if self.teacher_tokenizer is None:
            return super().make_collator(args)
        return PairedCollator((self.scorer.pad_token_id, pad_token_id(self.teacher_tokenizer)), args.pad_to_multiple_of)

    def _make_teacher(
        self, teacher: AnyTeacher | None, tokenizer: PreTrainedTokenizerBase, *, rows: Sequence[Any]
    ) -> Teacher:
        """The teacher; with a tokenizer of its own it is a model, of any vocabulary."""
        if self.teacher_tokenizer is None:
            return super()._make_teacher(teacher, tokenizer, rows=rows)
        if self.args.teacher_model_server_url is not None:
            raise ValueError(
                "teacher_model_server_url was given with use_uld_loss=True, which needs whole distributions. Pass "
                "teacher_model."
            )
        if teacher is None:
            raise ValueError("use_uld_loss=True needs a teacher_model, a model, or its name or path, got None.")
        kwargs: Any = self.args.teacher_model_init_kwargs
        model = load_teacher(teacher, kwargs, self.model)  # type: ignore[arg-type]
        return FrozenTeacher(FrozenModel(model, make_scorer(model, self.teacher_tokenizer)))

    # ---- completions

    def sampling(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Sampling:
        """How a model's completions are drawn."""
        policy: Any = Policy(model, tokenizer, tokenizer, None)
        sampling = sampling_of(self.args, policy)  # type: ignore[arg-type]
        return replace(sampling, seed=order_seed(self.args), vocabulary=self.vocabulary_of(tokenizer))

    def vocabulary_of(self, tokenizer: PreTrainedTokenizerBase) -> int | None:
        """With a teacher of another tokenizer those that the writer's own tokenizer has."""
        if self.pairing is None:
            return super().vocabulary_of(tokenizer)
        return len(self.pairing.known[tokenizer is self.teacher_tokenizer])

    def student_writer(self) -> Writer:
        """The student, or vLLM with its weights."""
        args: Any = self.args
        policy = Policy(self.model, self.processing_class, self._tokenizer, self.scorer)  # type: ignore[arg-type]
        served = check_engine(args)
        if served is not None:
            policy = served_policy(policy, args, served)
        engine = engine_of(args, self.model, policy, self.accelerator, served=served)
        return super().student_writer()._replace(engine=engine, batch=self._on_policy)

    def teacher_writer(self) -> Writer:
        """The teacher, in its own tokens."""
        if self.teacher_tokenizer is None:
            return super().teacher_writer()
        writer = self._writer(self.teacher.model, self.teacher_tokenizer)
        return writer._replace(
            prompts=lambda batch: prompts_of(batch[TEACHER_BATCH]),
            batch=lambda batch, _, completions: self._paired(batch, completions, by_teacher=True),
        )

    def _paired(self, batch: MicroBatch, completions: list[Generated], *, by_teacher: bool) -> dict[str, Tensor]:
        assert self.pairing is not None
        return self.make_collator(self.args)(self.pairing.generated(batch, completions, by_teacher=by_teacher))

    def _on_policy(
        self, batch: MicroBatch, prompts: list[list[int]], completions: list[Generated]
    ) -> dict[str, Tensor]:
        """A micro-batch with the student's completions, of which some are printed."""
        args, step = self.args, self.state.global_step
        if args.log_completions and step % args.log_completions_steps == 0 and self.is_world_process_zero():
            texts = self._tokenizer.batch_decode(prompts), self._tokenizer.batch_decode([x.ids for x in completions])
            print_prompt_completions_sample_uld(*texts, step, args.num_completions_to_print)
        trained = (
            completed(batch, prompts, completions)
            if self.pairing is None
            else self._paired(batch, completions, by_teacher=False)
        )
        return {**trained, ON_POLICY: torch.ones(len(prompts))}

    def _check_lengths(self) -> None:
        """Of both sides' tokens."""
        dataset = self.train_dataset
        if self.pairing is None or not isinstance(dataset, Dataset):
            super()._check_lengths()
            return
        assert self.model is not None
        models = self.model, without_wrappers(self.teacher.model)
        for name, model, writes in zip(("", THEIRS), models, (True, self.args.seq_kd), strict=True):
            names = {f"{name}{column}": column for column in ("input_ids", "completion_mask", PROMPT_ALONE)}
            names = {column: plain for column, plain in names.items() if column in dataset.column_names}
            rows = dataset.select_columns(list(names)).rename_columns(names if name else {})
            self.check_side(rows, [model] if writes else [], model)


def _tokenizer_of(args: Any, teacher: Any) -> PreTrainedTokenizerBase:
    """The teacher's tokenizer. Raises: ValueError where nothing says which it is."""
    name = args.teacher_tokenizer_name_or_path or (args.teacher_model_name_or_path if teacher is None else teacher)
    if isinstance(name, nn.Module):
        name = get_config_model_id(causal_core(name).config)
    if not name:
        raise ValueError(
            "use_uld_loss=True needs the teacher's tokenizer, and the teacher_model was not loaded by name. Set "
            "teacher_tokenizer_name_or_path."
        )
    trusts = bool((args.teacher_model_init_kwargs or {}).get("trust_remote_code", False))
    return text_tokenizer(load_processing_class(str(name), trust_remote_code=trusts))
