"""Sequence-classification models as reward sources: one number for each prompt with its completion."""

import logging
import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase

from trl.collators.reward import group_batch
from trl.data.formats import is_list_of_dicts_with, remove_none_values
from trl.data.hub import loading_from_hub
from trl.data.rendering import Chat, Json, ProcessingClass, read_tools, render, text_tokenizer
from trl.models.loading import get_config_model_id, load_processing_class
from trl.models.parts import causal_core, embedded_tokens
from trl.models.reference import FrozenModel
from trl.models.scoring.classifier import ClassificationScorer
from trl.models.setup import REWARD_MODEL, check_processing_class, load_classifier, pad_token_id, table_of_positions
from trl.models.switches import in_eval_mode
from trl.rewards.result import RewardError, RewardInputs, rows_by_prompt

logger = logging.getLogger(__name__)


class ModelSource:
    """A reward model as a source: its score at the last token of prompt and completion.

    By default it reads their text, with its own chat template and tokenizer. With `read="ids"` it reads the token ids
    of the rollout if the policy has the same vocabulary, otherwise the text (logged once). Shared prompts are run once.

    Args:
        model: a sequence-classification model with one label, or its name or path.
        processing_class: its tokenizer; by default the one saved with it, else the policy's.
        name: of its metrics; by default the last part of the model's path.
        deadline, on_failure: as in `RewardSource`.
        policy_tokenizer: the tokenizer of the rollouts' ids.
        batch_size: rows in one forward.

    Raises: ValueError for more than one label, TypeError for another kind of model.
    """

    is_async = False

    def __init__(
        self, model: str | os.PathLike[str] | nn.Module, processing_class: ProcessingClass | None = None, *,
        name: str | None = None, deadline: float | None = None, on_failure: str | None = None,
        read: Literal["text", "ids"] = "text", policy_tokenizer: PreTrainedTokenizerBase | None = None,
        batch_size: int = 32, model_init_kwargs: Json | None = None,
    ) -> None:  # fmt: skip
        if isinstance(model, (str, os.PathLike)):
            _check_saved(os.fspath(model))
        self.model = load_classifier(model, model_init_kwargs, REWARD_MODEL, seed=0).eval()
        core = causal_core(self.model)
        saved = get_config_model_id(core.config)
        self.name = name or Path(saved).name or type(core).__name__
        self.deadline, self.on_failure, self.batch_size = deadline, on_failure, batch_size
        if processing_class is None and model is self.model:
            has_files = any((Path(saved) / f"tokenizer{kind}.json").is_file() for kind in ("", "_config"))
            has_one = bool(saved) and (has_files or not Path(saved).is_dir())  # in its folder, or on the Hub
            processing_class = None if has_one else policy_tokenizer
        self.processing_class = processing_class or load_processing_class(core)
        check_processing_class(self.processing_class)
        self.tokenizer = text_tokenizer(self.processing_class)
        self.reads_ids = read == "ids"
        if read == "ids":
            if policy_tokenizer is None:
                raise ValueError("read='ids' needs policy_tokenizer, got None. Pass it, or use read='text'.")
            is_same = policy_tokenizer is self.tokenizer or policy_tokenizer.get_vocab() == self.tokenizer.get_vocab()
            if not is_same:
                text = "Reward model %r has another tokenizer than the policy: texts are tokenised again by its own."
                logger.warning(text, self.name)
            self.reads_ids = is_same
        self.scorer = ClassificationScorer(self.model, pad_token_id=pad_token_id(self.tokenizer))
        for fallback in self.scorer.fallbacks:
            logger.info("Reward model %r: %s.", self.name, fallback)
        self._longest = table_of_positions(core)
        self._known_tokens = embedded_tokens(core)

    def check_columns(self, columns: Collection[str]) -> None:
        """A model needs no columns."""

    def score(self, inputs: RewardInputs) -> list[float]:
        if self.reads_ids:
            pairs = zip(inputs.prompt_ids, inputs.completion_ids, strict=True)
            lists = [[*prompt, *completion] for prompt, completion in pairs]
        else:
            texts = [self._text(inputs, row) for row in range(len(inputs))]
            lists: Any = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        sequences = [torch.tensor(ids, dtype=torch.int64) for ids in lists]
        for row, ids in enumerate(sequences):
            self._check_sequence(ids, row, inputs)
        rows = range(len(sequences))
        scores, device = torch.zeros(len(sequences)), next(self.model.parameters()).device
        with in_eval_mode(self.model), torch.inference_mode():
            for chunk in (rows[at : at + self.batch_size] for at in range(0, len(rows), self.batch_size)):
                groups = rows_by_prompt([inputs.prompts[row] for row in chunk])
                batch = group_batch(
                    [[sequences[chunk[row]] for row in group] for group in groups],
                    prefix_sharing=self.scorer.shares_prefixes,
                    pad_token_id=self.scorer.pad_token_id,
                )
                logits = self.scorer.score(self.model, {name: tensor.to(device) for name, tensor in batch.items()})
                scores[[chunk[row] for group in groups for row in group]] = logits[:, 0].float().cpu()
        return scores.tolist()

    def _text(self, inputs: RewardInputs, row: int) -> str:
        prompt, completion = inputs.prompts[row], inputs.completions[row]
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt + completion
        if not is_list_of_dicts_with(prompt, "role"):
            kinds = f"{type(prompt).__name__} and {type(completion).__name__}"
            raise TypeError(f"row {row} has {kinds}, expected two texts or two lists of messages.")
        if self.tokenizer.chat_template is None:
            fault = f"the tokenizer of reward model {self.name!r} has no chat template, which messages need"
            raise ValueError(f"{fault}. Pass another tokenizer (reward_processing_classes).")
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        extra = {name: values[row] for name, values in inputs.columns.items()}
        kwargs = remove_none_values(extra.get("chat_template_kwargs") or {})
        messages = remove_none_values([*prompt, *completion])
        return render(self.processing_class, Chat(messages, read_tools(extra.get("tools")), kwargs))

    def _check_sequence(self, ids: Tensor, row: int, inputs: RewardInputs) -> None:
        if not len(ids):
            raise RewardError(f"was given no token in row {row}, expected at least 1")
        if self._longest is not None and len(ids) > self._longest:
            most = f"at most {self._longest}, the model's context length"
            raise RewardError(f"was given {len(ids)} tokens in row {row}, expected {most}")
        if int(ids.max()) >= self._known_tokens:
            fault = f"was given token {int(ids.max())} in row {row} ({inputs.row_text(row)})"
            has = f"the model's vocabulary has {self._known_tokens}"
            raise RewardError(f"{fault}, and {has}. Pass the model's own tokenizer (reward_processing_classes)")


def _check_saved(path: str) -> None:
    """Refuse a saved classifier with several labels; warn about a saved model without a head."""
    config: PreTrainedConfig | None = None
    with suppress(OSError, ValueError), loading_from_hub(path, "reward model"):  # loading reports these
        config = AutoConfig.from_pretrained(path)
    if config is None:
        return
    if not any("SequenceClassification" in name for name in config.architectures or []):
        logger.warning(
            "Reward model %r is saved as %s, without a head that scores sequences: its head is new, and its scores are "
            "random until it is trained.", path, " ".join(config.architectures or ["a model of unknown kind"]),
        )  # fmt: skip
    elif config.num_labels != 1:
        fault = f"reward model {path!r} has {config.num_labels} labels, expected 1"
        raise ValueError(f"{fault}. Train it with num_labels=1, as RewardTrainer does.")


def place_reward_models(models: Iterable[ModelSource], accelerator: Accelerator) -> None:
    """Move reward models to the device, or shard them as the policy is sharded."""
    for source in models:
        frozen = FrozenModel(source.model, source.scorer)
        frozen.prepare(accelerator)
        source.model = frozen.model
