"""Self-distillation: the teacher is the student, shown more in its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from trl.data.formats import is_list_of_dicts_with, maybe_convert_to_chatml
from trl.data.prompts import PROMPT_IDS, PromptPreparation, PromptTokenizer
from trl.data.rendering import ProcessingClass
from trl.experimental.sdft.sdft_config import SDFTConfig, SelfDistillation, filled
from trl.methods.distillation import DistillationMethod
from trl.methods.method import Batch, Scoring, Step
from trl.methods.online import ROLLOUT
from trl.models.packed.layout import TEACHER_BATCH
from trl.models.peft import AdapterConfig
from trl.models.scoring.head import ScoreOptions
from trl.objectives.distillation import Divergence, TeacherLoss, top_k_divergence
from trl.objectives.kl import LARGEST_LOG_RATIO
from trl.options.training import Optimizers
from trl.reporting.model_card import Paper
from trl.rewards.result import RewardInputs, Text
from trl.rewards.source import ProcessingClasses
from trl.rollouts.experience import OLD, TRAINED, Experience
from trl.rollouts.maker import Completed, RolloutMaker, Rows
from trl.tensors.ragged import Ragged
from trl.tensors.reduce import LossTerms, weighted
from trl.tensors.sequences import positions_in_sequence, tokens_by_sequence
from trl.tensors.vocabulary_loss import VocabularyLoss
from trl.trainer.callbacks.sync_ref_model import SyncRefModelCallback
from trl.trainer.distillation_trainer import DistillationTrainer
from trl.trainer.group_setup import AnyDataset, RewardFuncs
from trl.trainer.online_trainer import OnlineTrainer

CONTEXT = "privileged_context"


@dataclass(frozen=True)
class StudentTopK(TeacherLoss):
    """`top_k_divergence` over the student's k most likely tokens; without `tail` both sides are renormalised."""

    beta: float
    k: int
    tail: bool

    def of_logits(self, student: Tensor, teacher: Tensor) -> Tensor:
        shared = min(student.shape[-1], teacher.shape[-1])
        student = student[:, :shared]
        tokens = student.detach().topk(min(self.k, shared), dim=-1).indices
        logps = teacher[:, :shared].log_softmax(-1).gather(-1, tokens)
        return self.of_top_k(student, tokens, logps)

    def of_top_k(self, student: Tensor, tokens: Tensor, teacher_logps: Tensor) -> Tensor:
        return top_k_divergence(student, tokens, teacher_logps, beta=self.beta, tail=self.tail)


def distillation_loss(args: SelfDistillation) -> TeacherLoss:
    """The divergence of a token, of the modes that need distributions."""
    if args.distillation_mode == "topk_logits" and args.distillation_topk is not None:
        return StudentTopK(args.distillation_alpha, args.distillation_topk, args.distillation_add_tail)
    return Divergence(args.distillation_alpha)


class SelfDistillationMethod(DistillationMethod):
    """The mean over completions of the mean divergence of their tokens."""

    args: Any  # with the fields of SelfDistillation and RolloutTraining

    @property
    def loss(self) -> TeacherLoss:
        return distillation_loss(self.args)

    def distilled(self, experience: Experience) -> Tensor:
        """The tokens that are learned from the teacher, bool `(K,)`."""
        return experience.per_token[TRAINED]

    def token_weights(self, experience: Experience) -> Tensor:
        experience = experience.with_tokens(**{TRAINED: self.distilled(experience)})
        trained, row = experience.per_token[TRAINED], experience.completions.row_index
        counts = tokens_by_sequence(row[trained], len(experience)).clamp(min=1)
        return super().token_weights(experience) / counts[row]

    def divisor(self, experience: Experience) -> Tensor:
        """Completions with a token that is learned from the teacher."""
        row = experience.completions.row_index[self.distilled(experience)]
        return (tokens_by_sequence(row, len(experience)) > 0).sum()

    def score(self, batch: Batch, scoring: Scoring) -> VocabularyLoss:
        """The divergence; tokens that were sampled by an earlier student have importance weights."""
        experience, inputs, clip = batch[ROLLOUT], self.learned(batch), self.args.distillation_is_clip
        weights = self.token_weights(experience)
        if clip is not None and OLD in experience.per_token and not scoring.step.is_first:
            gaps = scoring.frozen_logps(inputs).logps - experience.per_token[OLD]
            ratios = gaps.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp().clamp(max=clip)
            weights = weights * ratios
        if self.args.distillation_mode != "sampled_token":
            return self.from_teacher(batch, scoring, weights)
        options, teacher = ScoreOptions(temperature=scoring.temperature), cast(Any, scoring.teacher)
        teacher_logps = teacher.reference.score(
            scoring.model,
            inputs[TEACHER_BATCH],
            lambda scorer, reference, rows: scorer.score(reference, rows, options).logps,
        )

        def losses(logps: Tensor, which: slice) -> Tensor:
            return weights[which] * (logps.detach() - teacher_logps[which]) * logps

        scored = scoring.logps(inputs, ScoreOptions(loss_of=losses))
        values = weights * (scored.logps.detach() - teacher_logps)
        total = (values * scored.logps).sum() if scored.total is None else scored.total
        return VocabularyLoss(total, values, scored.aux_loss)

    def objective(self, experience: Experience, scored: VocabularyLoss, step: Step) -> list[LossTerms]:
        (terms,) = super().objective(experience, scored, step)
        weights, name = self.token_weights(experience), "self_distillation/distillation_loss"
        values = weighted(torch.where(weights > 0, scored.values / weights, 0.0), weights)
        return [terms._replace(metrics={**terms.metrics, name: values})]


class SDFTMethod(SelfDistillationMethod):
    """Without the first `num_loss_tokens_to_skip` tokens of each completion."""

    args: SDFTConfig

    def apply_rewards(
        self, experience: Experience, scores: Tensor, inputs: RewardInputs, *, training: bool
    ) -> Experience:
        experience = super().apply_rewards(experience, scores, inputs, training=training)
        places = positions_in_sequence(experience.completions.row_index, len(experience))
        trained = experience.per_token[TRAINED] & (places >= self.args.num_loss_tokens_to_skip)
        return experience.with_tokens(**{TRAINED: trained})


@dataclass(frozen=True)
class TeacherPrompts:
    """Tokenises the prompts that teachers are shown; long ones lose their beginning."""

    processing_class: ProcessingClass
    settings: PromptPreparation
    context_length: int | None

    def tokens(self, rows: Rows, shown: Sequence[Any]) -> list[list[int]]:
        """The tokens of the prompts `shown` in place of those of the rows."""
        columns = {**{name: rows[name] for name in rows if name != PROMPT_IDS}, "prompt": shown}
        prompts = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        kind = self.processing_class, self.settings, "train", False, not isinstance(shown[0], str)
        return [row[PROMPT_IDS] for row in PromptTokenizer(*kind).rows(prompts, range(len(prompts)))]

    def with_prompts(self, experience: Experience, tokens: Sequence[Sequence[int]]) -> Experience:
        """The completions with the teacher's prompts, each cut to what the context has room for."""
        if (length := self.context_length) is not None:
            sizes = experience.completions.lengths.tolist()
            tokens = [row[-(length - size) :] for row, size in zip(tokens, sizes, strict=True)]
        return experience.with_more(teacher_prompts=Ragged.of(tokens))


class PrivilegedCompleter:
    """Completes prompts, and gives each row the prompt with its privileged context, which its teacher is shown."""

    def __init__(self, args: SDFTConfig, teacher_prompts: TeacherPrompts) -> None:
        self.args, self.teacher_prompts, self.exact = args, teacher_prompts, not args.generate_from_teacher

    def __call__(self, maker: RolloutMaker, rows: Rows, *, streams: Sequence[int]) -> Completed:
        template = self.args.teacher_prompt_template
        pairs = zip(rows["prompt"], rows[CONTEXT], strict=True)
        shown = [extended(template, prompt, privileged_context=text_of(context)) for prompt, context in pairs]
        tokens, prompts = self.teacher_prompts.tokens(rows, shown), rows[PROMPT_IDS]
        completed = maker.complete(tokens if self.args.generate_from_teacher else prompts, streams=streams)
        completed = replace(completed, prompts=Ragged.of(prompts))
        return Completed(self.teacher_prompts.with_prompts(completed, tokens))


def with_roles(prompt: Text) -> Any:
    """Messages with `role` and `content`, also those with `from` and `value`; other values as they are."""
    example: dict[str, Any] = {"prompt": prompt}
    return maybe_convert_to_chatml(example)["prompt"]


def text_of(context: Text) -> str:
    """A privileged context, text or messages, as text."""
    if isinstance(context, str):
        return context
    return "\n".join(str(message["content"]) for message in with_roles(context))


def extended(template: str, prompt: Text, **values: str) -> Text:
    """A prompt in a filled template; in a conversation its last message."""
    if isinstance(prompt, str):
        return filled(template, prompt=prompt, **values)
    *earlier, last = with_roles(prompt)
    return [*earlier, {**last, "content": extended(template, last["content"], **values)}]


class SelfDistillationTrainer(DistillationTrainer):
    """Base of the trainers whose teacher is the student, as `teacher_model_kind` says, shown other prompts."""

    args: Any  # with the fields of SelfDistillation and RolloutTraining
    method: SelfDistillationMethod

    def __init__(
        self, model: str | nn.Module | PreTrainedModel, reward_funcs: RewardFuncs = None,
        args: Any | None = None, train_dataset: AnyDataset | None = None,
        eval_dataset: AnyDataset | dict[str, AnyDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: ProcessingClasses = None, callbacks: list[TrainerCallback] | None = None,
        optimizers: Optimizers = (None, None), peft_config: AdapterConfig = None,
    ) -> None:  # fmt: skip
        others = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
        for name, dataset in {"train": train_dataset, **others}.items():
            if dataset is not None or name == "train":
                self.check_rows(dataset, name, args)
        OnlineTrainer.__init__(  # that of DistillationTrainer takes no rewards
            self, model, reward_funcs, args, train_dataset, eval_dataset, processing_class, reward_processing_classes,
            callbacks, optimizers, peft_config,
        )  # fmt: skip
        if self.images is not None:
            raise ValueError(f"{self._name} trains on text, got rows with images. Take the columns of images out.")
        limits = self._sets.settings.longest, getattr(self.args, "max_reprompt_len", None)
        settings = replace(self._sets.settings, keep=min((n for n in limits if n is not None), default=None))
        self.teacher_prompts = TeacherPrompts(self.processing_class, settings, self._sets.context_length)  # type: ignore[arg-type]

    def check_rows(self, dataset: Any, name: str, args: Any, columns: Sequence[str] = ("prompt",)) -> None:
        """Raise ValueError for a data set without the `columns`, or with a conversation that the user does not end."""
        if not isinstance(dataset, Dataset):
            raise ValueError(
                f"{name} dataset is a {type(dataset).__name__}, expected a stored datasets.Dataset. Load it without "
                "streaming."
            )
        if missing := [column for column in columns if column not in dataset.column_names]:
            expected = " and ".join(map(repr, columns))
            raise ValueError(f"{name} dataset has no column {missing[0]!r}, expected {expected}. Add it.")
        for row, prompt in enumerate(map(with_roles, dataset["prompt"])):
            last = prompt[-1] if is_list_of_dicts_with(prompt) else {}
            is_text = last.get("role") == "user" and isinstance(last.get("content"), str)
            if not (isinstance(prompt, str) or is_text):
                reason = f"ends with a message of {last.get('role')!r}" if last else f"is {prompt!r}"
                raise ValueError(
                    f"{name} dataset, row {row}: the prompt {reason}, expected text, or messages that end with a text "
                    "of the user, which is extended for the teacher."
                )

    def settle_reference(self) -> None:
        """With an average of the student's weights as the reference, which a callback moves and checkpoints have."""
        if self.args.teacher_model_kind == "ema":
            rate, every = self.args.teacher_update_rate, self.args.teacher_sync_steps
            self.reference = self.teacher.reference
            self.add_callback(SyncRefModelCallback(None, self.accelerator, alpha=rate, every=every))
        super().settle_reference()


class SDFTTrainer(SelfDistillationTrainer):
    """Trainer of self-distillation fine-tuning (arXiv:2601.19897).

    Rows have a `prompt` (text or messages) and a `privileged_context` (text or messages), such as a worked solution.
    The student completes the prompt. The teacher is the student as `teacher_model_kind` says, shown both; the student
    learns its distributions at the tokens of the completion. The other arguments are those of `DistillationTrainer`.

    Example:
        >>> trainer = SDFTTrainer("Qwen/Qwen3-0.6B", SDFTConfig("student"), dataset)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "sdft"]
    _name: ClassVar[str] = "SDFT"
    _paper = Paper("Self-Distillation Enables Continual Learning", "2601.19897")
    args: SDFTConfig  # type: ignore[assignment]
    method: SDFTMethod
    method_type = SDFTMethod
    config_type = SDFTConfig

    def __init__(
        self, model: str | nn.Module | PreTrainedModel, args: SDFTConfig | None = None,
        train_dataset: AnyDataset | None = None, eval_dataset: AnyDataset | dict[str, AnyDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        callbacks: list[TrainerCallback] | None = None, optimizers: Optimizers = (None, None),
        peft_config: AdapterConfig = None,
    ) -> None:  # fmt: skip
        super().__init__(
            model, None, args, train_dataset, eval_dataset, processing_class, None, callbacks, optimizers, peft_config,
        )  # fmt: skip
        self.rollouts.completer = PrivilegedCompleter(self.args, self.teacher_prompts)

    def check_rows(self, dataset: Any, name: str, args: Any, columns: Sequence[str] = ()) -> None:
        """Each row has a prompt and a privileged context."""
        super().check_rows(dataset, name, args, ["prompt", CONTEXT])
        for row, context in enumerate(dataset[CONTEXT]):
            if not context:
                raise ValueError(f"{name} dataset, row {row}: {CONTEXT} is {context!r}, expected text or messages.")
