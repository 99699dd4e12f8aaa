"""Self-distillation: the teacher is the student, shown more in its prompt."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from datasets import Dataset
from torch import Tensor

from trl.data.formats import by_name, is_list_of_dicts_with
from trl.data.prompts import PROMPT_IDS
from trl.experimental.sdft.sdft_config import SDFTConfig
from trl.methods.self_distillation import SelfDistillationMethod
from trl.models.peft import AdapterConfig
from trl.reporting.model_card import Paper
from trl.rewards.result import RewardInputs
from trl.rewards.source import ProcessingClasses
from trl.rollouts.experience import TRAINED, Experience
from trl.rollouts.maker import Completed, RolloutMaker, Rows
from trl.rollouts.teacher_prompts import TeacherPrompts, extended, text_of, with_roles
from trl.tensors.ragged import Ragged
from trl.tensors.sequences import positions_in_sequence
from trl.trainer import arguments
from trl.trainer.callbacks.sync_ref_model import SyncRefModelCallback
from trl.trainer.distillation_trainer import DistillationTrainer
from trl.trainer.group_setup import RewardFuncs
from trl.trainer.online_trainer import OnlineTrainer

CONTEXT = "privileged_context"


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


class SelfDistillationTrainer(DistillationTrainer):
    """Base of the trainers whose teacher is the student, as `teacher_model_kind` says, shown other prompts."""

    args: Any  # with the fields of SelfDistillation and RolloutTraining
    method: SelfDistillationMethod

    def __init__(
        self, model: arguments.AnyModel, reward_funcs: RewardFuncs = None, args: Any | None = None,
        train_dataset: arguments.AnyDataset | None = None, eval_dataset: arguments.EvalDatasets | None = None,
        processing_class: arguments.Processor | None = None, reward_processing_classes: ProcessingClasses = None,
        callbacks: arguments.Callbacks | None = None, optimizers: arguments.Optimizers = (None, None),
        peft_config: AdapterConfig = None,
    ) -> None:  # fmt: skip
        for name, dataset in {"train": train_dataset, **by_name(eval_dataset)}.items():
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

    def begin_rollouts(self, *args: Any, **kwargs: Any) -> None:
        """With an average of the student's weights as the reference, which a callback moves and checkpoints have."""
        super().begin_rollouts(*args, **kwargs)
        if self.args.teacher_model_kind == "ema":
            rate, every = self.args.teacher_update_rate, self.args.teacher_sync_steps
            self.reference = self.teacher.reference
            self.add_callback(SyncRefModelCallback(None, self.accelerator, alpha=rate, every=every))


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
        self, model: arguments.AnyModel, args: SDFTConfig | None = None,
        train_dataset: arguments.AnyDataset | None = None, eval_dataset: arguments.EvalDatasets | None = None,
        processing_class: arguments.Processor | None = None, callbacks: arguments.Callbacks | None = None,
        optimizers: arguments.Optimizers = (None, None), peft_config: AdapterConfig = None,
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
