"""Sequence-classification models as reward sources: one number for each prompt with its completion."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase

from trl.collators.reward import group_batch
from trl.data.formats import is_list_of_dicts_with, remove_none_values
from trl.data.hub import loading_from_hub
from trl.data.rendering import Chat, ProcessingClass, read_tools, render, text_tokenizer
from trl.models.classifier_setup import REWARD_MODEL, load_classifier
from trl.models.lending import in_eval_mode
from trl.models.loading import get_config_model_id, load_processing_class
from trl.models.parts import causal_core, embedded_tokens
from trl.models.scoring.classifier import ClassificationScorer
from trl.models.setup import check_processing_class, pad_token_id, table_of_positions
from trl.rewards.answers import RewardError
from trl.rewards.inputs import RewardInputs, rows_by_prompt

logger = logging.getLogger(__name__)


class ModelSource:
    """A reward model as a source: it scores a rollout at its last token.

    What it reads is the text of prompt and completion, under its own chat template where they are messages, in its own
    tokens. With `read="ids"` it reads the very tokens of the rollout where the policy's tokenizer is its own, and the text
    where it is another, which is said once. Prompts that rows share are run once for them.

    Args:
        model: a sequence-classification model with one label, or its name or path. `source.model` may be replaced by
            what wraps it (an accelerator's prepared model).
        processing_class: its tokenizer; by default the one saved with it.
        name: under which its metrics are logged; by default the last part of the model's path.
        deadline: seconds after which an answer is not waited for any more; None for that of the trainer.
        on_failure: "error" or "skip"; None for that of the trainer.
        read: "text" or "ids".
        policy_tokenizer: the tokenizer of the rollouts' ids.
        batch_size: rows in one forward.
        model_init_kwargs: for `from_pretrained` where `model` is a path.

    Raises: ValueError for more than one label, TypeError for a model of another kind.
    """

    is_async = False

    def __init__(
        self,
        model: Any,
        processing_class: ProcessingClass | None = None,
        *,
        name: str | None = None,
        deadline: float | None = None,
        on_failure: str | None = None,
        read: Literal["text", "ids"] = "text",
        policy_tokenizer: PreTrainedTokenizerBase | None = None,
        batch_size: int = 32,
        model_init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if isinstance(model, (str, os.PathLike)):
            _check_saved(os.fspath(model))
        self.model = load_classifier(model, model_init_kwargs, REWARD_MODEL, seed=0).eval()
        core = causal_core(self.model)
        self.name = name or _last_part(get_config_model_id(core.config)) or type(core).__name__
        self.deadline, self.on_failure, self.batch_size = deadline, on_failure, batch_size
        self.processing_class = processing_class or load_processing_class(core)
        check_processing_class(self.processing_class)
        self.tokenizer = text_tokenizer(self.processing_class)
        self.reads_ids = read == "ids" and self._speaks_as(policy_tokenizer)
        self.scorer = ClassificationScorer(self.model, pad_token_id=pad_token_id(self.tokenizer))
        for fallback in self.scorer.fallbacks:
            logger.info("Reward model %r: %s.", self.name, fallback)
        self._longest = table_of_positions(core)
        self._known_tokens = embedded_tokens(core)

    def check_columns(self, columns: Collection[str]) -> None:
        """A model needs no columns."""

    def ask(self, inputs: RewardInputs) -> list[float]:
        """Scores `(B,)` of prompts with their completions."""
        sequences = self._sequences(inputs)
        for row, ids in enumerate(sequences):
            self._check_sequence(ids, row, inputs)
        rows = range(len(sequences))
        scores = torch.zeros(len(sequences))
        with in_eval_mode(self.model), torch.inference_mode():
            for chunk in (rows[at : at + self.batch_size] for at in range(0, len(rows), self.batch_size)):
                rows_of = rows_by_prompt([inputs.prompts[row] for row in chunk])
                groups = [[chunk[row] for row in group] for group in rows_of]
                order = [row for group in groups for row in group]
                scores[order] = self._scores([[sequences[row] for row in group] for group in groups])
        return scores.tolist()

    def _scores(self, groups: list[list[Tensor]]) -> Tensor:
        batch = group_batch(
            groups, prefix_sharing=self.scorer.shares_prefixes, pad_token_id=self.scorer.pad_token_id
        )
        device = next(self.model.parameters()).device
        logits = self.scorer.score(self.model, {name: value.to(device) for name, value in batch.items()})
        return logits[:, 0].float().cpu()

    def _sequences(self, inputs: RewardInputs) -> list[Tensor]:
        if self.reads_ids:
            pairs = zip(inputs.prompt_ids, inputs.completion_ids, strict=True)
            sequences = [[*prompt, *completion] for prompt, completion in pairs]
        else:
            texts = [self._text(inputs, row) for row in range(len(inputs))]
            sequences: Any = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [torch.tensor(ids, dtype=torch.int64) for ids in sequences]

    def _text(self, inputs: RewardInputs, row: int) -> str:
        prompt, completion = inputs.prompts[row], inputs.completions[row]
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt + completion
        if not is_list_of_dicts_with(prompt, "role"):
            raise TypeError(
                f"row {row} has a prompt of type {type(prompt).__name__} and a completion of type "
                f"{type(completion).__name__}, expected two texts or two lists of messages. Give both in one form."
            )
        if text_tokenizer(self.processing_class).chat_template is None:
            raise ValueError(
                f"the tokenizer of reward model {self.name!r} has no chat template, expected one for prompts of messages. "
                "Set its chat_template, or pass a processing class that has one (reward_processing_classes)."
            )
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        extra = {
            name: inputs.columns[name][row]
            for name in ("tools", "chat_template_kwargs")
            if name in inputs.columns
        }
        kwargs = remove_none_values(extra.get("chat_template_kwargs") or {})
        messages = remove_none_values([*prompt, *completion])
        return render(self.processing_class, Chat(messages, read_tools(extra.get("tools")), kwargs))

    def _check_sequence(self, ids: Tensor, row: int, inputs: RewardInputs) -> None:
        if not len(ids):
            raise RewardError(f"was given no token in row {row}, expected some. Leave empty rollouts out.")
        if self._longest is not None and len(ids) > self._longest:
            raise RewardError(
                f"was given {len(ids)} tokens in row {row}, expected at most {self._longest}: each position of the model has "
                "a vector of its own. Shorten prompts or completions, or take another reward model."
            )
        if int(ids.max()) >= self._known_tokens:
            raise RewardError(
                f"was given token {int(ids.max())} in row {row} ({inputs.row_text(row)}), expected one of the "
                f"{self._known_tokens} that the model knows. Pass the model's own tokenizer (reward_processing_classes)."
            )

    def _speaks_as(self, policy: PreTrainedTokenizerBase | None) -> bool:
        """Whether the policy's ids mean the same to this model."""
        if policy is None:
            raise ValueError("read='ids' needs policy_tokenizer, got None. Pass it, or use read='text'.")
        if policy is self.tokenizer or policy.get_vocab() == self.tokenizer.get_vocab():
            return True
        logger.warning(
            "Reward model %r has another tokenizer than the policy: it scores the text of prompts and completions, "
            "tokenised again by its own.",
            self.name,
        )
        return False


def _last_part(path: str) -> str:
    return path.rstrip("/\\").replace("\\", "/").rpartition("/")[2]


def _check_saved(path: str) -> None:
    """Refuse a saved classifier of several classes; say that a saved model without a head gets a random one."""
    config: Any = None
    # No such model, or an adapter alone: loading says what is wrong.
    with suppress(OSError, ValueError), loading_from_hub(path, "reward model"):
        config = AutoConfig.from_pretrained(path)
    if config is None:
        return
    if not any("SequenceClassification" in name for name in config.architectures or []):
        logger.warning(
            "Reward model %r is saved as %s, without a head that scores sequences: its head is new, and its scores are "
            "random until it is trained.",
            path,
            " ".join(config.architectures or ["a model of unknown kind"]),
        )
    elif config.num_labels != 1:
        raise ValueError(
            f"reward model {path!r} has {config.num_labels} labels, expected 1. Train it with num_labels=1 (RewardTrainer "
            "does), or write a reward function that picks one of its scores."
        )
