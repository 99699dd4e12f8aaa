"""Static methods of TRL's `GKDTrainer`, for programs that call them; training computes the same from hidden states."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig

from trl.legacy.interface import LegacySFT, NotCalled, View, generation_settings
from trl.models.packed.layout import IGNORED
from trl.objectives.cross_vocabulary import divergence_entries
from trl.tensors.padding import first_true_indices


def generalized_jsd_loss(
    student_logits: Tensor, teacher_logits: Tensor, labels: Tensor | None = None, beta: float = 0.5,
    temperature: float = 1.0, reduction: Literal["batchmean", "sum", "mean", "none"] = "batchmean",
    logits_are_probs: bool = False,
) -> Tensor:  # fmt: skip
    """The divergence of logits `(B, T, V)`; `labels (B, T)` are aligned to them, and -100 where nothing counts.

    `batchmean`: over the tokens that count, or without labels the sum over the batch size. `sum`: over tokens. `mean`:
    over tokens and vocabulary. `none`: `(K, V)` of the K tokens that count, or `(B, T, V)` without labels.
    `logits_are_probs`: of probabilities, which need not sum to 1 and have no temperature.
    """
    if logits_are_probs:
        log_p, log_q = (probs.clamp(min=1e-8).log() for probs in (student_logits, teacher_logits))
    else:
        wide = torch.promote_types(student_logits.dtype, torch.float32)
        both = student_logits, teacher_logits
        log_p, log_q = ((logits / temperature).log_softmax(-1, dtype=wide) for logits in both)
    values = divergence_entries(log_p, log_q, beta=beta)
    if labels is not None:
        values = values[labels != IGNORED]
    if reduction == "batchmean":
        return values.sum() / len(values)
    if reduction == "sum":
        return values.sum()
    return values.mean() if reduction == "mean" else values


def generate_on_policy_outputs(
    model: Any, inputs: dict[str, Tensor], generation_config: Any, pad_token_id: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, attention mask and labels `(B, P + T)` of `model.generate` on `prompts (B, P)`, padded on the left.

    Labels are -100 on prompts and after the end token, which counts. `pad_token_id` has no effect.
    """
    prompts, mask = inputs["prompts"], inputs.get("prompt_attention_mask")
    tokens = model.generate(prompts, attention_mask=mask, generation_config=generation_config)
    ends = torch.tensor(generation_config.eos_token_id or [], device=tokens.device).flatten()
    completions = tokens[:, prompts.shape[1] :]
    lengths = first_true_indices(torch.isin(completions, ends)) + 1
    real = torch.arange(completions.shape[1], device=tokens.device) < lengths[:, None]
    attended = torch.cat([torch.ones_like(prompts) if mask is None else mask, real.to(prompts.dtype)], dim=1)
    labels = torch.cat([torch.full_like(prompts, IGNORED), completions.where(real, IGNORED)], dim=1)
    return tokens, attended, labels


class LegacyGKD(LegacySFT):
    """Attributes and static methods of `GKDTrainer`."""

    _not_called: ClassVar[NotCalled] = {
        "generalized_jsd_loss": (("outcome",), "Override outcome(model, batch)"),
        "generate_on_policy_outputs": (("get_batch_samples",), "Override get_batch_samples"),
    }
    generation_config = View(lambda trainer: GenerationConfig(**generation_settings(trainer)))
    generation_kwargs = View(generation_settings)
    teacher_model = View("teacher.model")
    generalized_jsd_loss = staticmethod(generalized_jsd_loss)
    generate_on_policy_outputs = staticmethod(generate_on_policy_outputs)
