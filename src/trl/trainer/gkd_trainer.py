"""Generalised knowledge distillation: a student learns a teacher's distributions, on data or on its own completions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from trl._lazy import attach
from trl.checkpoints.spread import Spread
from trl.collators.preference import completion_batch
from trl.data.formats import column_names, last_turn_as_completion
from trl.data.prepared_sets import RowSet, sequence_lengths
from trl.data.ragged import read_ragged, table_blocks
from trl.data.rendering import text_tokenizer
from trl.data.teacher_columns import (
    TEACHER,
    TEACHER_COLUMNS,
    WithTeacherColumns,
    check_teacher_columns,
    check_teacher_names,
    has_teacher_columns,
)
from trl.data.text import PROMPT_ALONE
from trl.generation.engine import Engine, Generated, Sampling
from trl.generation.teacher_servers import TeacherServers, served_teacher
from trl.generation.transformers.engine import TransformersEngine, context_length_of, without_wrappers
from trl.generation.transformers.requests import stop_tokens
from trl.legacy.distillation_methods import LegacyGKD
from trl.methods.gkd import GKDMethod
from trl.models.packed.layout import IGNORED
from trl.models.packed.sequence_group import SequenceGroup
from trl.models.parts import causal_core, embedded_tokens
from trl.models.peft import AdapterConfig
from trl.models.policy import Policy
from trl.models.setup import check_positions
from trl.models.teacher import ColumnTeacher, Teacher, TeacherByRow, make_teacher
from trl.reporting.model_card import Paper
from trl.trainer import arguments
from trl.trainer.arguments import AnyDataset, AnyModel, EvalDatasets, FormattingFunction, Optimizers
from trl.trainer.gkd_config import GKDConfig
from trl.trainer.loaders import order_seed
from trl.trainer.row_sets import SFTSets, sft_sets
from trl.trainer.sft_trainer import SFTTrainer

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere

AnyTeacher = AnyModel | Mapping[str, str | nn.Module]
MicroBatch = Mapping[str, Tensor]


class Writer(NamedTuple):
    """An engine, the prompts that it completes of a micro-batch, and the micro-batch with its completions."""

    engine: Engine
    sampling: Sampling
    prompts: Callable[[MicroBatch], list[list[int]]]
    batch: Callable[[MicroBatch, list[list[int]], list[Generated]], MicroBatch]


@dataclass(frozen=True)
class GeneratedCompletions:
    """Replaces the completions of micro-batches: by the student's in a share `lmbda` of them, else by a teacher's, if
    it has one.

    The draw and the completions follow from the seed and the optimiser step. `rows` is the number of rows of a
    micro-batch, `micro_batches` that of a step that is not an epoch's last. `rank` of `world_size` counts the parts of
    the data; the processes of a `group`, which have the same rows, share them out.
    """

    student: Writer
    teacher: Writer | None
    lmbda: float
    rows: int
    micro_batches: int
    rank: int
    world_size: int
    group: SequenceGroup | None = None

    def writers(self, step: int, count: int) -> list[Writer | None]:
        """What completes each micro-batch of an optimiser step, alike in all processes; None: the data set."""
        seed = (self.student.sampling.seed or 0) % 2**63
        draws = np.random.default_rng([seed, step]).random(count).tolist()
        return [self.student if draw < self.lmbda else self.teacher for draw in draws]

    def replaced(self, batches: Sequence[MicroBatch], step: int, model: nn.Module) -> list[MicroBatch]:
        """The micro-batches of an optimiser step; `model` is the student's, with its present weights."""
        replaced, writers = list(batches), self.writers(step, len(batches))
        for writer in (self.student, self.teacher):
            turns = [turn for turn, chosen in enumerate(writers) if chosen is writer]
            if writer is None or not turns:
                continue
            if writer is self.student:
                writer.engine.sync_weights(model, step)
            prompts = {turn: writer.prompts(batches[turn]) for turn in turns}
            streams = [
                ((step * self.micro_batches + turn) * self.world_size + self.rank) * self.rows + row
                for turn in turns
                for row in range(len(prompts[turn]))
            ]
            flat = [prompt for turn in turns for prompt in prompts[turn]]
            completions = iter(self._generate(writer, flat, streams))
            for turn in turns:
                answers = list(islice(completions, len(prompts[turn])))
                replaced[turn] = writer.batch(batches[turn], prompts[turn], answers)
        return replaced

    def _generate(self, writer: Writer, prompts: list[list[int]], streams: list[int]) -> list[Generated]:
        """The completions of some prompts, of which the processes of a group generate equal numbers."""
        rank, size = (0, 1) if self.group is None else (self.group.rank, self.group.size)
        places = [(place + rank) % len(prompts) for place in range(0, len(prompts), size)]
        local_prompts, local_streams = [prompts[place] for place in places], [streams[place] for place in places]
        answers = writer.engine.generate(local_prompts, writer.sampling, streams=local_streams)
        shares = [answers] if self.group is None else self.group.objects(answers)
        return [shares[place % size][place // size] for place in range(len(prompts))]


def prompt_lengths(dataset: Dataset) -> np.ndarray:
    """Tokens of each prepared row's prompt (see `prompts_of`); 0 for rows without a completion."""
    if "completion_mask" not in dataset.column_names:
        return np.zeros(len(dataset), np.int64)
    found = []
    for block in table_blocks(dataset):
        mask = read_ragged(block["completion_mask"], "completion_mask")
        trained = np.flatnonzero(mask.values)
        firsts = np.append(trained, len(mask.values))[np.searchsorted(trained, mask.offsets[:-1])]
        found.append(np.minimum(firsts - mask.offsets[:-1], mask.lengths))
    lengths = np.concatenate(found)
    if PROMPT_ALONE not in dataset.column_names:
        return lengths
    blocks = [read_ragged(block[PROMPT_ALONE], PROMPT_ALONE) for block in table_blocks(dataset)]
    alone = np.concatenate([block.lengths * (block.values[block.offsets[:-1]] != IGNORED) for block in blocks])
    return np.where(alone, alone, lengths)


def prompts_of(rows: Mapping[str, Tensor]) -> list[list[int]]:
    """The prompt of each padded row as tokenised by itself, else its tokens before the first trained one."""
    prompts, alone = [], rows.get(PROMPT_ALONE)
    for row, (ids, labels, real) in enumerate(
        zip(rows["input_ids"], rows["labels"], rows["attention_mask"] != 0, strict=True)
    ):
        start = int((labels[real] != IGNORED).int().argmax())
        whole = [] if alone is None else alone[row][alone[row] != IGNORED].tolist()
        prompts.append(whole or ids[real][: max(start, 1)].tolist())
    return prompts


def completed(batch: MicroBatch, prompts: list[list[int]], completions: list[Generated]) -> dict[str, Tensor]:
    """The prompts of a batch with one completion each, of the same teachers."""
    rows = [(prompt, [completion.ids]) for prompt, completion in zip(prompts, completions, strict=True)]
    teachers = {TEACHER: batch[TEACHER]} if TEACHER in batch else {}
    return {**completion_batch(rows, prefix_sharing=False), **teachers}


KEPT_COLUMNS = (*TEACHER_COLUMNS, TEACHER, PROMPT_ALONE)


class GKDSets(SFTSets):
    """The last turn of a conversation is its completion."""

    def prepared(self, dataset: RowSet, name: str, *, is_training: bool = False) -> RowSet:
        settings: Any = self.train_settings if is_training else self.settings
        is_rows = isinstance(dataset, (Dataset, IterableDataset))
        if settings.packing and is_rows and TEACHER in column_names(dataset):
            raise ValueError(
                f"{name} dataset has a column {TEACHER!r}, by which rows choose among several teachers; packing=True "
                "does not keep them apart. Leave packing out (rows are never padded), or remove the column."
            )
        if is_rows and settings.formatting_func is None:
            dataset = last_turn_as_completion(dataset)
        return super().prepared(dataset, name, is_training=is_training)


AnyGKDSets = TypeVar("AnyGKDSets", bound=GKDSets)


def gkd_sets(
    args: GKDConfig, policy: Policy, formatting_func: FormattingFunction | None, sets: type[AnyGKDSets]
) -> AnyGKDSets:
    """The data sets of distillation; long rows lose the beginning of their prompt."""
    alone = bool(args.lmbda or args.seq_kd)
    return sft_sets(args, policy, formatting_func, sets, keep_end=True, keep_columns=KEPT_COLUMNS, prompts_alone=alone)


def _sets(train: RowSet | None, evaluation: RowSet | Mapping[str, RowSet] | None) -> dict[str, RowSet | None]:
    """The data sets of a trainer by name."""
    return {"train": train, **(evaluation if isinstance(evaluation, Mapping) else {"eval": evaluation})}


class GKDTrainer(LegacyGKD, SFTTrainer):
    """Trainer of a student that learns from a teacher's distributions (arXiv:2306.13649).

    Args:
        model: the student: a causal language model, or a name or path.
        teacher_model: the teacher: a model of the same tokenizer, its name or path, or the address of a server; or a
            dict of several by the rows' column `teacher`. None: the rows' columns of `trl teach`, or with an adapter
            the student's base.
        args: a `GKDConfig`.
        train_dataset: rows of `messages`, whose last turn is the completion, or of prompt and completion.

    The other arguments are those of `SFTTrainer`. The loss is the mean over all completion tokens of an optimiser step.
    Student and teacher are both at `temperature`.

    Example:
        >>> from datasets import load_dataset
        >>> trainer = GKDTrainer(
        ...     "Qwen/Qwen3-0.6B",
        ...     teacher_model="Qwen/Qwen3-4B",
        ...     train_dataset=load_dataset("trl-lib/chatbot_arena_completions", split="train"),
        ... )  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _columns: tuple[str, ...] = (*SFTTrainer._columns, *KEPT_COLUMNS)
    _tag_names: ClassVar[list[str]] = ["trl", "gkd"]
    _name: ClassVar[str] = "GKD"
    _paper = Paper("On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes", "2306.13649")
    _config_class: ClassVar[type[GKDConfig]] = GKDConfig
    evaluation_metrics: ClassVar[tuple[str, ...]] = ("loss",)
    method: GKDMethod
    args: GKDConfig

    def __init__(
        self, model: AnyModel | None = None,
        teacher_model: AnyTeacher | None = None, args: GKDConfig | None = None,
        data_collator: arguments.Collator | None = None, train_dataset: AnyDataset | None = None,
        eval_dataset: EvalDatasets | None = None,
        processing_class: arguments.Processor | None = None,
        compute_metrics: arguments.ComputeMetrics | None = None,
        callbacks: arguments.Callbacks | None = None, optimizers: Optimizers = (None, None),
        preprocess_logits_for_metrics: arguments.PreprocessLogits | None = None,
        peft_config: AdapterConfig = None, formatting_func: FormattingFunction | None = None, **older: Any,
    ) -> None:  # fmt: skip
        if older.pop("compute_loss_func", None) is not None:
            raise TypeError("compute_loss_func is another loss than the divergence of GKD. Leave it out.")
        super().__init__(
            model, args, data_collator, train_dataset, eval_dataset, processing_class, compute_metrics=compute_metrics,
            callbacks=callbacks, optimizers=optimizers, preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            peft_config=peft_config, formatting_func=formatting_func, **older,
        )  # fmt: skip
        args, tokenizer = self.args, text_tokenizer(self.processing_class)  # type: ignore[arg-type]
        if self.with_images:
            raise ValueError("GKD trains on text, got rows with images. Take the columns of images out.")
        self.method = GKDMethod(args)
        teacher: Any = teacher_model or args.teacher_model_server_url or args.teacher_model_name_or_path
        self.teacher = self._make_teacher(teacher, tokenizer, rows=(train_dataset, eval_dataset))
        if args.seq_kd and self.teacher.model is None:
            raise ValueError(
                "seq_kd=True needs a teacher that generates: a model other than the student's base. Pass "
                "teacher_model, or set seq_kd=False."
            )
        self.teacher.prepare(self.accelerator)
        self._generated = self._completions() if args.lmbda or args.seq_kd else None
        self._check_lengths()

    def make_sets(self, args: GKDConfig, policy: Policy, formatting_func: FormattingFunction | None) -> GKDSets:
        """The data sets, of which rows are tokenised."""
        return gkd_sets(args, policy, formatting_func, GKDSets)

    def _make_teacher(
        self, given: AnyTeacher | None, tokenizer: PreTrainedTokenizerBase, *, rows: Sequence[Any]
    ) -> Teacher:
        """The teacher: servers, columns of the `rows` as they were given (without another teacher), or a model."""
        args, student = self.args, self.model
        assert student is not None
        size, names = embedded_tokens(causal_core(student)), ()
        teacher: Teacher = ColumnTeacher()
        if (served := served_teacher(given, args, tokenizer, vocabulary=size)) is not None:
            teacher, names = served, served.names
        elif given is None and any(map(has_teacher_columns, _sets(*rows).values())):
            if args.lmbda:
                raise ValueError(
                    f"lmbda={args.lmbda}: the rows' teacher columns belong to completions of the dataset. Set "
                    "lmbda=0.0, or pass teacher_model."
                )
            prepared = _sets(self.train_dataset, self.eval_dataset)
            for name, dataset in _sets(*rows).items():
                if dataset is not None:
                    check_teacher_columns(
                        dataset, prepared[name], tokenizer, temperature=args.temperature, max_length=args.max_length,
                        completion_only=args.completion_only_loss is not False, name=name,
                    )  # fmt: skip
        else:
            kwargs: Any = args.teacher_model_init_kwargs
            teacher = make_teacher(given, kwargs, student, tokenizer, scorer=self.scorer)  # type: ignore[arg-type]
            names = tuple(teacher.teachers) if isinstance(teacher, TeacherByRow) else ()
            if not names:
                return teacher
        for name, dataset in _sets(self.train_dataset, self.eval_dataset).items():
            if names:
                check_teacher_names(dataset, names, name=name)
        self.data_collator = WithTeacherColumns(self.data_collator, size, names)
        return teacher

    def _completions(self) -> GeneratedCompletions:
        args = self.args
        teacher = self.teacher_writer() if args.seq_kd else None
        sizes = args.per_device_train_batch_size, args.gradient_accumulation_steps
        place = args.data_index, args.data_processes, self.scorer.group
        return GeneratedCompletions(self.student_writer(), teacher, args.lmbda, *sizes, *place)

    def changed_draws(self, before: Spread, now: Spread) -> list[str]:
        """Also the choice of the micro-batches whose completions are generated."""
        is_drawn = 0 < self.args.lmbda < 1 and before.micro_batches != now.micro_batches
        return [*super().changed_draws(before, now), *["the rows that are completed (lmbda)"] * is_drawn]

    def student_writer(self) -> Writer:
        """What generates the student's completions."""
        assert self.model is not None
        return self._writer(self.model, self._tokenizer)

    def teacher_writer(self) -> Writer:
        """What generates the teacher's."""
        return self._writer(self.teacher.model, self._tokenizer)

    def _writer(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Writer:
        engine = TransformersEngine(model, tokenizer=tokenizer, accelerator=self.accelerator)
        return Writer(engine, self.sampling(without_wrappers(model), tokenizer), self._prompts, completed)

    def sampling(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Sampling:
        """How a model's completions are drawn."""
        return Sampling(
            max_new_tokens=self.args.max_new_tokens,
            temperature=self.args.temperature,
            stop_token_ids=tuple(stop_tokens(model, tokenizer)),
            seed=order_seed(self.args),
            vocabulary=self.vocabulary_of(tokenizer),
        )

    def vocabulary_of(self, tokenizer: PreTrainedTokenizerBase) -> int | None:
        """How many token ids completions may have: those that the student and all models that teach it have."""
        return min(self.scorer.vocabulary, self.teacher.vocabulary or self.scorer.vocabulary)

    def _prompts(self, batch: MicroBatch) -> list[list[int]]:
        return prompts_of({**batch, **self.scorer.padded_inputs(batch)})

    def _check_lengths(self) -> None:
        """`check_side` of the training set. Rows of streams are not known before."""
        dataset, student = self.train_dataset, self.model
        assert student is not None
        if isinstance(dataset, Dataset) and "input_ids" in dataset.column_names:
            teacher = without_wrappers(self.teacher.model or student)
            self.check_side(dataset, [student, *([teacher] if self.args.seq_kd else [])], teacher)

    def check_side(self, dataset: Dataset, writers: Sequence[nn.Module], reader: nn.Module) -> None:
        """Raise ValueError for rows that the `reader` has no positions for, and, if completions are generated, without
        a prompt or with one that fills the context of one of the `writers`.
        """
        if self._generated is None:
            check_positions(reader, sequence_lengths(dataset), dataset_name="train")
            return
        prompts = prompt_lengths(dataset)
        if not prompts.all():
            raise ValueError(
                f"{int((prompts == 0).sum())} of {len(prompts)} rows have no prompt to complete (or "
                f"max_length={self.args.max_length} leaves none). Use rows of messages, or of prompt and completion, "
                "filter these rows out, or set lmbda=0 and seq_kd=False."
            )
        window = min((n for n in map(context_length_of, writers) if n is not None), default=None)
        if window is not None and prompts.max() >= window:
            raise ValueError(
                f"the longest prompt has {prompts.max()} tokens, the context length is {window}: no room for a "
                f"completion. Set max_length below {window}."
            )
        longest = prompts + (self._generated.student.sampling.new_tokens or 0)
        check_positions(reader, longest, dataset_name="train")

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """The micro-batches of an optimiser step, some with sampled completions, and their count."""
        batches: Any = list(islice(epoch_iterator, num_batches))
        if self._generated is not None and batches:
            assert self.model_wrapped is not None
            batches = self._generated.replaced(batches, self.state.global_step, self.model_wrapped)
        if isinstance(self.teacher, TeacherServers) and batches:
            batches = self.teacher.filled(batches, self.scorer.padded_inputs)
        return super().get_batch_samples(iter(batches), num_batches, device)
