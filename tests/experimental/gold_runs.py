"""GOLD on eight rows of a student and a teacher with other tokenizers and chat templates."""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.tiny import tiny_model
from tests.tiny_tokenizers import CORPUS, TEMPLATES, tiny_tokenizer
from tests.trainer.one_step import trainer_of
from trl.experimental.gold import GOLDConfig, GOLDTrainer

OTHER_TEMPLATE = (
    "{%- for m in messages -%}{{- '[' + m['role'] + '] ' + m['content'] + (eos_token if m['role'] == 'assistant' else '') -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '[assistant] ' -}}{%- endif -%}"
)
ANSWERS = (
    "Seven apples and 12 pears.", "Blue.", "It is blue, naïve 中文.", "Look up. Next.", "The answer is 42.", "Two oars.",
    "Brief.", "And then? It is.",
)  # fmt: skip
ROWS = [
    {
        "prompt": [{"role": "user", "content": f"Q{n}?"}],
        "completion": [{"role": "assistant", "content": text}],
    }
    for n, text in enumerate(ANSWERS)
]


@cache
def _other_backend() -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special: list[Any] = ["</s>", "<pad>"]
    trainer: Any = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS[:2], trainer)
    return backend.to_str()


def other_tokenizer(template: str | None = OTHER_TEMPLATE) -> PreTrainedTokenizerFast:
    """A tokenizer of 300 tokens with other names of its special tokens."""
    found = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_other_backend()), eos_token="</s>", pad_token="<pad>"
    )
    found.chat_template = template
    return found


@cache
def _saved(kind: str) -> str:
    folder = tempfile.mkdtemp()
    (other_tokenizer() if kind == "other" else tiny_tokenizer(kind)).save_pretrained(folder)
    return folder


def gold(out: str | None = None, *, tokenizer: str = "other", **settings: Any) -> Any:
    """A trainer whose teacher has `other_tokenizer`, or the tokenizer of one of `TEMPLATES`."""
    assert tokenizer == "other" or tokenizer in TEMPLATES
    size = 300 if tokenizer == "other" else 400
    settings.setdefault("model", tiny_model("gpt2", vocab_size=400, dtype=torch.float64))
    settings.setdefault("teacher_model", tiny_model("llama", vocab_size=size, dtype=torch.float64, seed=1))
    settings = {
        "lmbda": 0.0, "use_uld_loss": True, "max_completion_length": 6, "teacher_tokenizer_name_or_path": _saved(tokenizer), **settings,
    }  # fmt: skip
    return trainer_of(
        GOLDTrainer,
        GOLDConfig,
        out,
        settings,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tiny_tokenizer(),
    )
