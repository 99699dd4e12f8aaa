"""Teachers of distillation behind one interface: `teacher.divergence(scorer, model, batch, loss)`.

`make_teacher` makes a separate model a teacher, or the student's base with its adapter disabled, or several that rows
choose among; `own_teacher` the student itself, its initial weights or a copy. `ColumnTeacher` reads columns.
"""

import copy
import logging
import os
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, Protocol

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl.data.rendering import text_tokenizer
from trl.data.teacher_columns import TEACHER, TEACHER_COLUMNS, TEACHER_IDS, TEACHER_LOGPS
from trl.models.distributed import is_sharded, will_shard
from trl.models.loading import LoadArguments, load_processing_class
from trl.models.packed.layout import IGNORED, TEACHER_BATCH, Columns, Inputs, scored_sequences
from trl.models.parts import causal_core, embedded_tokens, share_parameters
from trl.models.peft import is_peft_model
from trl.models.policy import make_scorer
from trl.models.reference import AdapterReference, FrozenModel, InitialPolicy, Reference, is_movable
from trl.models.scoring.causal import OwnStates, Scorer
from trl.models.scoring.encoder_decoder import language_scorer
from trl.models.setup import load_model
from trl.objectives.distillation import TeacherLoss
from trl.tensors.vocabulary_loss import Losses, LossOfLogits, VocabularyLoss

logger = logging.getLogger(__name__)


class Teacher(Protocol):
    """Next-token distributions that a student learns.

    A kind of teacher says what `over_chunks` reads beside the student (`reads`), and which form of a loss takes it.
    """

    model: nn.Module | None = None
    """A model of its own, which can also generate; None where there is none."""
    vocabulary: int | None = None
    """How many token ids it can read; None: all of the student's."""

    def prepare(self, accelerator: Accelerator) -> None:
        """Move a separate model to the device, or shard it like the student."""

    def reads(self, model: nn.Module, batch: Columns) -> Inputs:
        """Arguments of `over_chunks` beside the student `model`."""
        return {}

    def loss_of(self, loss: TeacherLoss, batch: Columns) -> LossOfLogits:
        """The loss of a chunk of logits."""
        return lambda logits, others, _: loss.of_logits(logits, others)

    def divergence(
        self, scorer: Scorer, model: nn.Module, batch: Columns, loss: TeacherLoss, *, temperature: float = 1.0,
        weights: Tensor | None = None,
    ) -> VocabularyLoss:  # fmt: skip
        """The sum of `loss` over the scored positions of `batch`, with gradient for the student `model`.

        It is computed chunk by chunk. `scorer` is the student's; `model` may be wrapped. `temperature` divides the
        logits of both, `weights` `(K,)` multiply the losses. Teachers that are models read the batch's `teacher_batch`
        where it has one: other prompts with the same completions in order. Call it under autocast in mixed precision.
        """
        loss_of, reads = self.loss_of(loss, batch), self.reads(model, batch)

        def weighted(logits: Tensor, others: Tensor | None, rows: slice) -> Losses:
            losses = loss_of(logits, others, rows)
            if weights is None:
                return losses
            return (losses[0] * weights[rows], losses[1]) if isinstance(losses, tuple) else losses * weights[rows]

        return scorer.over_chunks(model, batch, weighted, temperature=temperature, **reads)


class FrozenTeacher(Teacher):
    """A separate model."""

    def __init__(self, reference: FrozenModel) -> None:
        self.reference = reference

    @property
    def model(self) -> nn.Module:  # type: ignore[override]
        return self.reference.model

    @property
    def vocabulary(self) -> int | None:  # type: ignore[override]
        return self.reference.scorer.vocabulary

    def prepare(self, accelerator: Accelerator) -> None:
        """Move it to the device, or shard it like the student. Raises: ValueError where the device has no room."""
        device, state, module = accelerator.device, accelerator.state, self.reference.module
        is_sharded_run = state.deepspeed_plugin is not None or getattr(state, "fsdp_plugin", None) is not None
        if device.type == "cuda" and is_movable(module) and not is_sharded_run:
            size = sum(p.nbytes for p in module.parameters() if p.device.type != device.type)
            free = torch.cuda.mem_get_info(device)[0] if size else 0
            if size > free:
                raise ValueError(
                    f"the teacher needs {size / 2**30:.1f} GiB, {device} has {free / 2**30:.1f} GiB left. Shard it "
                    "(FSDP, ZeRO-3), quantise it (teacher_model_init_kwargs), write its answers into columns (`trl "
                    "teach`), or serve it elsewhere (teacher_model_server_url)."
                )
        self.reference.prepare(accelerator)

    def reads(self, model: nn.Module, batch: Columns) -> Inputs:
        other = (self.reference.scorer, self.reference.model)
        return {"other": other, "other_batch": batch.get(TEACHER_BATCH)}


class SelfTeacher(Teacher):
    """The student itself (`InitialPolicy`, live) or its base (`AdapterReference`).

    Its hidden states are computed first, without gradient, then read through the head in the student's pass.
    """

    def __init__(self, reference: Reference) -> None:
        self.reference = reference

    def reads(self, model: nn.Module, batch: Columns) -> Inputs:
        shown = batch.get(TEACHER_BATCH, batch)
        states = self.reference.score(model, shown, lambda scorer, inner, rows: scorer.scored_states(inner, rows))
        return {"other": OwnStates(states, base=isinstance(self.reference, AdapterReference))}


class ColumnTeacher(Teacher):
    """Answers in the batch: `teacher_ids` and `teacher_logps` `(K, k)`, in the order of the scored positions.

    They are the teacher's k most likely tokens and their log-probs, at the temperature of the loss.
    """

    def loss_of(self, loss: TeacherLoss, batch: Columns) -> LossOfLogits:
        ids, logps = batch[TEACHER_IDS], batch[TEACHER_LOGPS]
        return lambda logits, _, rows: loss.of_top_k(logits, ids[rows], logps[rows])


class TeacherByRow(Teacher):
    """Several teachers: `teacher` `(S,)` of a batch says for each sequence which one, by its number in `teachers`.

    Each is given the rows that are its own, as padded rows. Where a run has several processes each of them calls every
    teacher, so that all gather the same weights, with a row that trains nothing where none is its own.
    """

    def __init__(self, teachers: Mapping[str, Teacher]) -> None:
        self.teachers = dict(teachers)
        known = [teacher.vocabulary for teacher in self.teachers.values()]
        self.vocabulary = min((size for size in known if size is not None), default=None)

    def prepare(self, accelerator: Accelerator) -> None:
        for teacher in self.teachers.values():
            teacher.prepare(accelerator)

    def divergence(
        self, scorer: Scorer, model: nn.Module, batch: Columns, loss: TeacherLoss, *, temperature: float = 1.0,
        weights: Tensor | None = None,
    ) -> VocabularyLoss:  # fmt: skip
        whole, sequence = scorer.padded_inputs(batch), scored_sequences(batch)
        shown = scorer.padded_inputs(batch[TEACHER_BATCH]) if TEACHER_BATCH in batch else None
        chosen, losses, places = batch[TEACHER], [], []
        chosen = chosen.repeat_interleave(len(whole["input_ids"]) // len(chosen))  # completions of one row
        for number, teacher in enumerate(self.teachers.values()):
            rows, places_of = ((ids == number).nonzero()[:, 0] for ids in (chosen, chosen[sequence]))
            if not len(rows) and PartialState().num_processes == 1:
                continue
            part: Inputs = _rows_of(whole, rows)
            part |= {name: batch[name][places_of] for name in TEACHER_COLUMNS if name in batch}
            if shown is not None:
                part[TEACHER_BATCH] = _rows_of(shown, rows)
            of_part = None if weights is None else weights[places_of]
            losses.append(teacher.divergence(scorer, model, part, loss, temperature=temperature, weights=of_part))
            places.append(places_of)
        order, count = torch.cat(places).argsort(), max(len(sequence), 1)
        values, statistics = (
            torch.cat(parts)[order] for parts in zip(*((x.values, x.statistics) for x in losses), strict=True)
        )
        total = torch.stack([x.total for x in losses]).sum()
        routers = [x.aux_loss * (len(x.values) / count) for x in losses if x.aux_loss is not None]
        return VocabularyLoss(total, values, torch.stack(routers).sum() if routers else None, statistics)


def _rows_of(padded: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Some rows of a padded batch; where there are none, one that trains nothing."""
    if len(rows):
        return {name: value[rows] for name, value in padded.items()}
    first = {name: value[:1] for name, value in padded.items()}
    return {**first, "labels": torch.full_like(first["labels"], IGNORED)}


def make_teacher(
    teacher: Any, init_kwargs: LoadArguments | None, student: nn.Module, tokenizer: PreTrainedTokenizerBase, *,
    scorer: Scorer | None = None,
) -> Teacher:  # fmt: skip
    """The teacher of `student`: a model, or a name or path to load; None: the base of a `PeftModel`.

    `init_kwargs` are those of `from_pretrained`. A dict has several by name, of which rows choose one. Vocabularies may
    differ in size by embeddings that no token has; the loss uses the common part. `scorer` is the student's. Raises:
    ValueError without a teacher, for `init_kwargs` with a loaded model, for a teacher with other tokens, or one that
    shares trained weights with the student; TypeError for what is no model.
    """
    if isinstance(teacher, Mapping):
        make = partial(make_teacher, init_kwargs=init_kwargs, student=student, tokenizer=tokenizer, scorer=scorer)
        return TeacherByRow({name: make(model) for name, model in teacher.items()})
    is_path = isinstance(teacher, (str, os.PathLike))
    if teacher is None and not init_kwargs:
        if scorer is None or not is_peft_model(student):
            raise ValueError(
                "teacher_model must be a model, or its name or path, got None. Pass teacher_model, or train an "
                "adapter, whose base is then the teacher."
            )
        return own_teacher("base", student, scorer)
    if is_path:  # before the weights are loaded
        _check_tokens(tokenizer, os.fspath(teacher), bool((init_kwargs or {}).get("trust_remote_code")))
    teacher = load_teacher(teacher, init_kwargs, student)
    sizes = [embedded_tokens(causal_core(model)) for model in (student, teacher)]
    if min(sizes) < len(tokenizer):
        raise ValueError(
            f"student and teacher have vocabularies of {sizes[0]} and {sizes[1]} tokens, the tokenizer has "
            f"{len(tokenizer)}: they do not share it. {OTHER_TOKENIZER}"
        )
    if not is_path:
        _check_tokens(tokenizer, causal_core(teacher).config.name_or_path or "", False)
    if sizes[0] != sizes[1]:
        logger.warning(
            "student and teacher have vocabularies of %d and %d tokens: their first %d are compared.",
            *sizes,
            min(sizes),
        )
    of_teacher = make_scorer(teacher, tokenizer)
    of_teacher.join(None if scorer is None else scorer.group)
    return FrozenTeacher(FrozenModel(teacher, of_teacher))


def load_teacher(teacher: object, init_kwargs: LoadArguments | None, student: nn.Module) -> PreTrainedModel:
    """The model of a teacher that is not the student: `teacher` itself, or that of its name or path.

    Raises: ValueError for `init_kwargs` with a loaded model, and for one that shares trained weights with the student.
    """
    if init_kwargs and not isinstance(teacher, (str, os.PathLike)):
        kind = "none" if teacher is None else f"a {type(teacher).__name__} that is loaded already"
        raise ValueError(f"teacher_model_init_kwargs={dict(init_kwargs)!r} needs a teacher_model by name, got {kind}.")
    model = load_model(teacher, dict(init_kwargs or {}), name="teacher_model")
    if share_parameters(student, model, trained=True):
        raise ValueError("teacher_model and model share weights that train. Load the teacher a second time.")
    return model


OTHER_TOKENIZER = "Use GOLDTrainer for a teacher with another tokenizer."


def _check_tokens(tokenizer: PreTrainedTokenizerBase, path: str, trust_remote_code: bool) -> None:
    """Raise ValueError where the tokenizer that is saved with a teacher, if any, has other tokens for some ids.

    For some architectures transformers then makes a tokenizer of the few special tokens; sizes are still compared.
    """
    try:
        theirs = load_processing_class(path, trust_remote_code=trust_remote_code) if path else tokenizer
    except OSError:
        return
    ours, other = ({i: token for token, i in x.get_vocab().items()} for x in (tokenizer, text_tokenizer(theirs)))
    if 10 * len(other) < len(ours):
        return
    different = [i for i in sorted(ours.keys() & other.keys()) if ours[i] != other[i]]
    if different:
        examples = ", ".join(f"{i} ({ours[i]!r} and {other[i]!r})" for i in different[:3])
        raise ValueError(
            f"student and teacher ('{path}') have different tokens for {len(different)} of {len(ours)} ids: "
            f"{examples}. {OTHER_TOKENIZER}"
        )


def own_teacher(kind: Literal["live", "base", "ema"], student: nn.Module, scorer: Scorer) -> Teacher:
    """The student as a teacher: as it is now (`live`), its initial weights (`base`), or a copy (`ema`).

    The base of a `PeftModel` is the model with its adapter disabled. The copy of a `PeftModel` shares the weights that
    do not train, unless they are sharded. A callback moves it (`SyncRefModelCallback`), and it is part of checkpoints:
    give its `reference` to the trainer. Raises: ValueError for a student whose weights are sharded already.
    """
    if kind == "live":
        return SelfTeacher(InitialPolicy(student, scorer))
    if kind == "base" and is_peft_model(student):
        return SelfTeacher(AdapterReference(scorer))
    if is_sharded(student):
        raise ValueError(
            f"the weights of {type(student).__name__} are sharded already and cannot be copied for the teacher. "
            "Pass the model as an object that was loaded before."
        )
    held = {} if will_shard() else {id(x): x for x in student.parameters() if not x.requires_grad}
    shared = frozenset(name for name, x in student.named_parameters() if id(x) in held)
    model = copy.deepcopy(student, held)  # a deep copy does not copy what is in its memo
    of_copy = language_scorer(model, pad_token_id=scorer.pad_token_id)
    of_copy.join(scorer.group)
    return FrozenTeacher(FrozenModel(model, of_copy, shared=shared))
