"""Self-distillation: the teacher is the student, shown more in its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from trl.data.prompts import PROMPT_IDS, PromptPreparation, PromptTokenizer
from trl.data.rendering import ProcessingClass
from trl.experimental.sdft.sdft_config import SDFTConfig, SelfDistillation
from trl.models.packed.layout import TEACHER_BATCH
from trl.models.scoring.head import ScoreOptions
from trl.models.switches import undisturbed, without_ddp
from trl.objectives.distillation import Divergence, TeacherLoss, top_k_divergence
from trl.rewards.result import RewardInputs
from trl.rollouts.experience import OLD, TRAINED, Experience
from trl.rollouts.maker import Completed, RolloutMaker, Rows
from trl.tensors.ragged import Ragged
from trl.tensors.reduce import LossTerms, weighted
from trl.tensors.sequences import positions_in_sequence, tokens_by_sequence
from trl.tensors.vocabulary_loss import VocabularyLoss
from trl.trainer.callbacks.sync_ref_model import SyncRefModelCallback
from trl.trainer.distillation_trainer import DistillationMethod, DistillationTrainer
from trl.trainer.grpo_config import RolloutTraining
from trl.trainer.online_method import GroupMethod, StepContext
from trl.trainer.online_trainer import AnyDataset

CONTEXT = "privileged_context"
LARGEST_LOG_RATIO = 20.0


@dataclass(frozen=True)
class StudentTopK(TeacherLoss):
    """`top_k_divergence` over the student's k most likely tokens; without `tail` both distributions are renormalised."""

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


class SDFTMethod(DistillationMethod):
    """The mean over completions of the mean divergence of their tokens."""

    args: SDFTConfig  # type: ignore[assignment]

    @property
    def loss(self) -> TeacherLoss:
        return distillation_loss(self.args)

    def apply_rewards(
        self, experience: Experience, scores: Tensor, inputs: RewardInputs, *, training: bool
    ) -> Experience:
        """`trained` leaves out the first `num_loss_tokens_to_skip` tokens of each completion."""
        experience = super().apply_rewards(experience, scores, inputs, training=training)
        places = positions_in_sequence(experience.completions.row_index, len(experience))
        trained = experience.per_token[TRAINED] & (places >= self.args.num_loss_tokens_to_skip)
        return experience.with_tokens(**{TRAINED: trained})

    def token_weights(self, experience: Experience) -> Tensor:
        trained, row = experience.per_token[TRAINED], experience.completions.row_index
        counts = tokens_by_sequence(row[trained], len(experience)).clamp(min=1)
        return super().token_weights(experience) / counts[row]

    def divisor(self, experience: Experience) -> Tensor:
        """Completions with a trained token."""
        row = experience.completions.row_index[experience.per_token[TRAINED]]
        return (tokens_by_sequence(row, len(experience)) > 0).sum()

    def objective(  # type: ignore[override]
        self, experience: Experience, scored: VocabularyLoss, context: StepContext
    ) -> list[LossTerms]:
        (terms,) = super().objective(experience, scored, context)
        weights = self.token_weights(experience)
        values = torch.where(weights > 0, scored.values / weights, 0.0)
        name = "self_distillation/distillation_loss"
        return [
            terms._replace(metrics={**terms.metrics, name: weighted(values, experience.per_token[TRAINED])})
        ]


class PrivilegedCompleter:
    """Completes prompts, and gives each row the prompt that its teacher is shown."""

    def __init__(
        self, args: SDFTConfig, processing_class: ProcessingClass, settings: PromptPreparation
    ) -> None:
        longest = min(n for n in (settings.longest, 2**31) if n is not None)
        self.args, self.exact = args, not args.generate_from_teacher
        self.processing_class, self.settings = processing_class, replace(settings, keep=longest)

    def teacher_prompts(self, rows: Rows) -> Ragged:
        """The tokens of the teacher's prompts; long ones lose their beginning."""
        pairs = zip(rows["prompt"], rows[CONTEXT], strict=True)
        prompts = [shown(self.args, prompt, context) for prompt, context in pairs]
        is_chat = not isinstance(prompts[0], str)
        tokenize = PromptTokenizer(self.processing_class, self.settings, "train", False, is_chat)
        others = {name: values for name, values in rows.items() if name not in ("prompt", PROMPT_IDS)}
        given = [
            dict(zip(["prompt", *others], row, strict=True))
            for row in zip(prompts, *others.values(), strict=True)
        ]
        return Ragged.of([row[PROMPT_IDS] for row in tokenize.rows(given, range(len(given)))])

    def __call__(self, maker: RolloutMaker, rows: Rows, *, streams: Sequence[int]) -> Completed:
        of_teacher = self.teacher_prompts(rows)
        prompts = rows[PROMPT_IDS]
        generated = (
            [row.tolist() for row in of_teacher.split()] if self.args.generate_from_teacher else prompts
        )
        found = maker.complete(generated, streams=streams)
        return Completed(replace(found, prompts=Ragged.of(prompts), teacher_prompts=of_teacher))


def text_of(context: Any) -> str:
    """A privileged context, text or messages, as text."""
    return context if isinstance(context, str) else "\n".join(str(message["content"]) for message in context)


def shown(args: SDFTConfig, prompt: Any, context: Any) -> Any:
    """The teacher's prompt: a text, or a conversation whose last message, of the user, has the context."""
    context = text_of(context)
    if isinstance(prompt, str):
        return args.filled(prompt, context)
    return [*prompt[:-1], {**prompt[-1], "content": args.filled(prompt[-1]["content"], context)}]


def check_contexts(dataset: Any, name: str) -> None:
    """Raise ValueError for rows without a prompt or a privileged context, or with a conversation that ends otherwise than with
    a text of the user."""
    if not isinstance(dataset, Dataset):
        kind = type(dataset).__name__
        raise ValueError(
            f"{name} dataset is a {kind}, expected a stored datasets.Dataset. Load it without streaming."
        )
    if missing := [column for column in ("prompt", CONTEXT) if column not in dataset.column_names]:
        raise ValueError(
            f"{name} dataset has no column {missing[0]!r}, expected 'prompt' and '{CONTEXT}'. Add it."
        )
    for row, (prompt, context) in enumerate(zip(dataset["prompt"], dataset[CONTEXT], strict=True)):
        if not context:
            raise ValueError(
                f"{name} dataset, row {row}: {CONTEXT} is {context!r}, expected text or messages."
            )
        last = None if isinstance(prompt, str) else prompt[-1]
        if last is not None and (last["role"] != "user" or not isinstance(last["content"], str)):
            raise ValueError(
                f"{name} dataset, row {row}: the last message of the prompt is of the {last['role']}, expected a text of the "
                "user, which the privileged context is added to."
            )


class SDFTTrainer(DistillationTrainer):
    """Trainer of self-distillation fine-tuning (arXiv:2601.19897).

    Rows have a `prompt` (text or messages) and a `privileged_context` (text or messages), such as a worked solution. The student
    completes the prompt. The teacher is the student as `teacher_model_kind` says, shown both; the student learns its
    distributions at the tokens of the completion. The other arguments are those of `DistillationTrainer`.

    Example:
        >>> trainer = SDFTTrainer("Qwen/Qwen3-0.6B", SDFTConfig("student"), dataset)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "sdft"]
    _name: ClassVar[str] = "SDFT"
    _paper: ClassVar[dict[str, str]] = {
        "title": "Self-Distillation Enables Continual Learning",
        "id": "2601.19897",
    }
    args: SDFTConfig  # type: ignore[assignment]
    method: SDFTMethod
    method_type: ClassVar[type[GroupMethod]] = SDFTMethod
    config_type: ClassVar[type[RolloutTraining]] = SDFTConfig

    def __init__(
        self,
        model: str | nn.Module | PreTrainedModel,
        args: SDFTConfig | None = None,
        train_dataset: AnyDataset | None = None,
        eval_dataset: AnyDataset | dict[str, AnyDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any | None = None,
    ) -> None:
        others = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
        for name, dataset in {"train": train_dataset, **others}.items():
            if dataset is not None or name == "train":
                check_contexts(dataset, name)
        super().__init__(
            model, None, args, train_dataset, eval_dataset, processing_class, callbacks, optimizers, peft_config=peft_config  # type: ignore[arg-type]
        )  # fmt: skip
        if self.images is not None:
            raise ValueError("SDFT trains on text, got rows with images. Take the columns of images out.")
        self.rollouts.completer = PrivilegedCompleter(self.args, self.processing_class, self._sets.settings)  # type: ignore[arg-type]

    def settle_reference(self) -> None:
        """With an average of the student's weights as the reference, which a callback moves and checkpoints have."""
        if self.args.teacher_model_kind == "ema":
            rate, every = self.args.teacher_update_rate, self.args.teacher_sync_steps
            self.reference = self.teacher.reference
            self.add_callback(SyncRefModelCallback(None, self.accelerator, alpha=rate, every=every))
        super().settle_reference()

    def learn(self, model: nn.Module, inputs: dict[str, Any], experience: Experience) -> VocabularyLoss:
        """The divergence; tokens that were sampled by an earlier student have importance weights."""
        weights, clip = self.method.token_weights(experience), self.args.distillation_is_clip
        options = ScoreOptions(temperature=self.sampling.temperature)
        if clip is not None and OLD in experience.per_token and not self.context.is_first:
            with torch.no_grad(), undisturbed(self.model_wrapped):  # type: ignore[arg-type]
                present = self.score(without_ddp(self.model_wrapped), inputs, options).logps  # type: ignore[arg-type]
            gaps = present - experience.per_token[OLD]
            ratios = gaps.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp().clamp(max=clip)
            weights = weights * ratios
        if self.args.distillation_mode != "sampled_token":
            return self.from_teacher(model, inputs, weights)
        theirs = self.teacher.reference.score(
            model, inputs[TEACHER_BATCH], lambda scorer, own, rows: scorer.score(own, rows, options).logps
        )

        def losses(logps: Tensor, which: slice) -> Tensor:
            return weights[which] * (logps.detach() - theirs[which]) * logps

        scored = self.score(model, inputs, replace(options, loss_of=losses))
        values = weights * (scored.logps.detach() - theirs)
        total = (values * scored.logps).sum() if scored.total is None else scored.total
        return VocabularyLoss(total, values, scored.aux_loss)
