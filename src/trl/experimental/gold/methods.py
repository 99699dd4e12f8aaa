"""Functions and classes of TRL's GOLD, for programs that call them; training computes the same from hidden states."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl.collators.rows import as_ids, pad_with_mask
from trl.data.tokenization import encode, encode_open
from trl.experimental.gold.gold_config import GOLDConfig
from trl.experimental.gold.gold_data import Pairing
from trl.experimental.gold.gold_method import TOKEN_WEIGHT, GOLDMethod, SpanLoss
from trl.models.packed.layout import IGNORED, TEACHER_BATCH
from trl.models.setup import pad_token_id
from trl.reporting.tables import print_samples


class ULDLoss(nn.Module):
    """The distance of a student from a teacher with another tokenizer, of the logits of both.

    Its settings are those of a `GOLDConfig`, under their names without `uld_`.
    """

    ignore_index = IGNORED

    def __init__(
        self,
        config: GOLDConfig,
        student_tokenizer: PreTrainedTokenizerBase | None = None,
        teacher_tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        super().__init__()
        if student_tokenizer is None or teacher_tokenizer is None:
            raise ValueError("ULDLoss needs student_tokenizer and teacher_tokenizer, got None. Pass both.")
        self.config, self.beta = config, config.beta
        self.student_tokenizer, self.teacher_tokenizer = student_tokenizer, teacher_tokenizer
        self.pairing = Pairing.of(student_tokenizer, teacher_tokenizer, config)
        for name, value in vars(config).items():
            if name.startswith("uld_"):
                setattr(self, name.removeprefix("uld_"), value)
        self.use_extended_uld = config.use_extended_uld

    def forward(
        self, student_logits: Tensor, teacher_logits: Tensor, student_labels: Tensor, teacher_labels: Tensor,
        student_input_ids: Tensor, teacher_input_ids: Tensor,
    ) -> Tensor:  # fmt: skip
        """Of logits `(B, T, V)`, `(B, T', V')` and labels `(B, T)`: the tokens themselves, -100 where none counts.

        The mean over all spans of the batch, and the mean cross-entropy of its tokens.
        """
        logits, labels = (student_logits, teacher_logits), (student_labels, teacher_labels)
        sides = [
            {
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "labels": row_labels,
                "spans": torch.zeros_like(ids),
            }
            for ids, row_labels in zip((student_input_ids, teacher_input_ids), labels, strict=True)
        ]
        for row in range(len(student_labels)):
            places_of = [(side["labels"][row] != IGNORED).nonzero()[:, 0] for side in sides]
            ids = [side["input_ids"][row][places].tolist() for side, places in zip(sides, places_of, strict=True)]
            alignment = self.pairing.spans(ids[0], ids[1])
            for side, places, spans in zip(sides, places_of, alignment[:2], strict=True):
                side["spans"][row, places] = torch.from_numpy(spans + 1).to(places.device)
        method = GOLDMethod(self.config, self.pairing, (student_logits.shape[-1], teacher_logits.shape[-1]))
        batch: dict[str, Any] = {**sides[0], TEACHER_BATCH: sides[1]}
        spans, tokens = method.count(batch).clamp(min=1)
        loss = SpanLoss(method, {**batch, TOKEN_WEIGHT: int(spans) / int(tokens)}, size=student_logits[..., 0].numel())
        read = [
            values[:, :-1][rows["labels"][:, 1:] != IGNORED] for values, rows in zip(logits, loss.rows, strict=True)
        ]
        return loss(read[0], read[1], slice(0, len(read[0])))[0].sum() / spans


class GOLDVLLMSyncCallback(TrainerCallback):
    """Gives the generating engine the weights after each step, as `GOLDTrainer` itself does before each generation."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self.trainer._generated is not None:
            self.trainer._generated.student.engine.sync_weights(self.trainer.model_wrapped, state.global_step)


def build_teacher_inputs_from_texts(
    tokenizer: PreTrainedTokenizerBase, prompt_texts: Sequence[str], completion_texts: Sequence[str]
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Tokens, labels and attention mask `(B, T)`, padded on the right, and the length of the longest prompt.

    Labels are -100 on prompts and padding; completions end with the end token.
    """
    prompts = [as_ids(ids) for ids, _ in encode_open(tokenizer, prompt_texts)]
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    completions = [as_ids([*ids, *end]) for ids in encode(tokenizer, completion_texts)]
    rows = list(zip(prompts, completions, strict=True))
    ids, mask = pad_with_mask([torch.cat(row) for row in rows], pad_token_id(tokenizer))
    labels = [torch.cat([torch.full_like(prompt, IGNORED), completion]) for prompt, completion in rows]
    return ids, pad_with_mask(labels, IGNORED)[0], mask, max(map(len, prompts), default=0)


def print_prompt_completions_sample_uld(
    prompts: list[str], completions: list[str], step: int, num_samples: int | None = None
) -> None:
    """`print_prompt_completions_sample` without rewards and advantages."""
    print_samples(prompts, completions, {}, step, num_samples)
