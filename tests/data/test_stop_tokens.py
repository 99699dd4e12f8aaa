"""A chat that its template has closed gets no second stop token, whatever kind of row it becomes; what is open gets one."""

from typing import Any

import pytest
from datasets import Dataset
from tests.tiny_tokenizers import tiny_tokenizer

from trl.data.pipeline import prepare_dataset
from trl.data.preference import PreferencePreparation, RewardPreparation
from trl.data.text import SFTPreparation
from trl.data.unpaired import UnpairedPreparation

ASK, UP, NEXT = ({"role": "user", "content": "And then?"}, *({"role": "assistant", "content": text} for text in ("Look up.", "Next.")))  # fmt: skip
OPEN = "{%- for m in messages -%}{{- m['role'] + ': ' + m['content'] + '\\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}"
PAIR = {"prompt": [ASK], "chosen": [UP], "rejected": [NEXT]}


def sft(rows: list[dict[str, Any]], tokenizer: Any, **settings: Any) -> list[list[int]]:
    prepared, _ = prepare_dataset(Dataset.from_list(rows), tokenizer, SFTPreparation(**settings))
    return [row["input_ids"] for row in prepared]


def pair(rows: list[dict[str, Any]], tokenizer: Any, **settings: Any) -> list[list[int]]:
    prepared, _ = prepare_dataset(Dataset.from_list(rows), tokenizer, PreferencePreparation(**settings))
    return [row["prompt_input_ids"] + row["chosen_input_ids"] for row in prepared]


def reward(rows: list[dict[str, Any]], tokenizer: Any, **settings: Any) -> list[list[int]]:
    prepared, _ = prepare_dataset(Dataset.from_list(rows), tokenizer, RewardPreparation(**settings))
    return [row["chosen_input_ids"] for row in prepared]


def unpaired(rows: list[dict[str, Any]], tokenizer: Any, **settings: Any) -> list[list[int]]:
    settings = {"mismatch_group": 2, **settings}
    prepared, _ = prepare_dataset(Dataset.from_list(rows), tokenizer, UnpairedPreparation(**settings))
    return [row["prompt_input_ids"] + row["completion_input_ids"] for row in prepared][:1]


RATED = {"prompt": [ASK], "completion": [UP], "label": True}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "messages": (sft, {"messages": [ASK, UP]}),
    "prompt and completion": (sft, {"prompt": [ASK], "completion": [UP]}),
    "pair": (pair, PAIR),
    "whole pair": (pair, {"chosen": [ASK, UP], "rejected": [ASK, NEXT]}),
    "reward": (reward, PAIR),
    "unpaired": (unpaired, RATED),
    "pair, unpaired": (unpaired, PAIR),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_chat_is_what_the_template_writes(kind: str) -> None:
    prepare, row = KINDS[kind]
    for template, eos in (("chatml", None), ("chatml", "<|stop|>"), ("qwen3_like", None), ("marked", None)):
        tokenizer = tiny_tokenizer(template)
        tokenizer.eos_token = eos or tokenizer.eos_token  # templates close turns with another token than the eos, too
        expected = tokenizer.apply_chat_template([ASK, UP], tokenize=False)
        assert expected.endswith("<|im_end|>\n")
        assert {tokenizer.decode(ids) for ids in prepare([row] * 2, tokenizer)} == {expected}


@pytest.mark.parametrize("kind", ["pair", "whole pair", "unpaired", "pair, unpaired"])
def test_a_chat_that_its_template_leaves_open_is_closed(kind: str) -> None:
    prepare, row = KINDS[kind]
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = OPEN
    expected = "user: And then?\nassistant: Look up.\n<|im_end|>"
    assert {tokenizer.decode(ids) for ids in prepare([row] * 2, tokenizer)} == {expected}


RENDERED = "<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\nLook up.<|im_end|>\n"
TEXTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "text": (sft, {"text": RENDERED}),
    "prompt and completion": (sft, {"prompt": RENDERED[:50], "completion": RENDERED[50:]}),
    "pair": (pair, {"prompt": RENDERED[:50], "chosen": RENDERED[50:], "rejected": "Next."}),
    "reward": (reward, {"prompt": RENDERED[:50], "chosen": RENDERED[50:], "rejected": "Next."}),
    "unpaired": (unpaired, {"prompt": RENDERED[:50], "completion": RENDERED[50:], "label": True}),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_text_that_was_rendered_before_is_not_closed_again(kind: str) -> None:
    prepare, row = TEXTS[kind]
    tokenizer = tiny_tokenizer()
    assert {tokenizer.decode(ids) for ids in prepare([row] * 2, tokenizer)} == {RENDERED}


def test_a_cut_chat_of_an_unpaired_row_ends_with_its_stop_token() -> None:
    """A row without room for the newline behind it loses the newline alone."""
    tokenizer = tiny_tokenizer()
    tokens = len(tokenizer(RENDERED)["input_ids"])
    cut = {
        length: next(tokenizer.decode(ids) for ids in unpaired([RATED] * 2, tokenizer, max_length=length))
        for length in (tokens + 1, tokens - 1)
    }
    assert cut[tokens + 1] == RENDERED
    assert cut[tokens - 1].endswith("<|im_end|>") and cut[tokens - 1].count("<|im_end|>") <= 2
