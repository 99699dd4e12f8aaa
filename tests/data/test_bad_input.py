"""Bad input: the error's class, and a message that names row, column and what to do, before anything is trained."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from tests.tiny_tokenizers import tiny_tokenizer

from trl.data.text import SFTPreparation, prepare_sft_dataset

USER = {"role": "user", "content": "And then?"}
BLUE = {"role": "assistant", "content": "Blue."}
GOOD = {"messages": [USER, BLUE]}


@dataclass(frozen=True)
class Bad:
    """Rows that must be refused with `error`, whose message has all of `says`."""

    rows: list[dict[str, Any]]
    error: type[Exception]
    says: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    template: str = "chatml"
    special: dict[str, Any] = field(default_factory=dict)


def messages(*second_row: Any) -> list[dict[str, Any]]:
    return [GOOD, {"messages": list(second_row)}]


ASSISTANT_ONLY = {"assistant_only_loss": True}

CASES: dict[str, Bad] = {
    # columns
    "no known column": Bad([{"question": "a", "answer": "b"}], ValueError, ("row 0", "'text'")),
    "text column of another name": Bad(
        [{"text": "a"}], ValueError, ("row 0", "dataset_text_field"), {"text_field": "body"}
    ),
    "prompt only": Bad([{"prompt": "a"}], ValueError, ("row 0", "GRPOTrainer")),
    "completion only": Bad([{"completion": "a"}], ValueError, ("row 0", "add 'prompt'")),
    "preference": Bad([{"prompt": "a", "chosen": "b", "rejected": "c"}], ValueError, ("row 0", "DPOTrainer")),
    "no rows": Bad([], ValueError, ("train dataset", "Check its file")),
    # text
    "None as text": Bad([{"text": "a"}, {"text": None}], ValueError, ("row 1, column 'text'",)),
    "number as text": Bad([{"text": 3}], TypeError, ("row 0, column 'text'",)),
    "empty text": Bad([{"text": "a"}, {"text": ""}], ValueError, ("row 1, column 'text'",)),
    "list of texts": Bad([{"text": ["a", "b"]}], TypeError, ("row 0, column 'text'",)),
    "empty completion": Bad([{"prompt": "a", "completion": ""}], ValueError, ("row 0, column 'completion'",)),
    "None as prompt": Bad(
        [{"prompt": "a", "completion": "b"}, {"prompt": None, "completion": "b"}],
        ValueError,
        ("row 1, column 'prompt'",),
    ),
    "prompt text, completion messages": Bad(
        [{"prompt": "a", "completion": [BLUE]}], TypeError, ("row 0, column 'prompt'",)
    ),
    "prompt messages, completion text": Bad(
        [{"prompt": [USER], "completion": "b"}], TypeError, ("row 0, column 'completion'",)
    ),
    # messages
    "string as messages": Bad([{"messages": "Hello"}], TypeError, ("row 0, column 'messages'",)),
    "None as messages": Bad([GOOD, {"messages": None}], ValueError, ("row 1, column 'messages'",)),
    "no messages": Bad(messages(), ValueError, ("row 1, column 'messages'",)),
    "message that is text": Bad(
        [{"messages": ["Hello"]}], TypeError, ("row 0, column 'messages', message 0",)
    ),
    "no role": Bad(messages({"content": "a"}), ValueError, ("row 1, column 'messages', message 0",)),
    "misspelt role": Bad(
        messages(USER, {"role": "assitant", "content": "a"}),
        ValueError,
        ("row 1, column 'messages', message 1",),
    ),
    "unheard-of role": Bad(
        messages({"role": "narrator", "content": "a"}), ValueError, ("unknown role 'narrator'",)
    ),
    "unknown speaker": Bad(
        [{"conversations": [{"from": "wizard", "value": "a"}]}],
        ValueError,
        ("row 0, column 'messages', message 0",),
    ),
    "None as content": Bad(
        messages(USER, {"role": "assistant", "content": None}),
        ValueError,
        ("row 1, column 'messages', message 1",),
    ),
    "number as content": Bad(
        [{"messages": [{"role": "user", "content": 3}]}], TypeError, ("row 0, column 'messages', message 0",)
    ),
    "content parts without a type": Bad(
        [{"messages": [{"role": "user", "content": ["a"]}]}],
        TypeError,
        ("row 0, column 'messages', message 0",),
    ),
    "empty conversational prompt": Bad(
        [{"prompt": [USER], "completion": [BLUE]}, {"prompt": [], "completion": [BLUE]}],
        ValueError,
        ("row 1, column 'prompt'",),
    ),
    "tools that are not JSON": Bad([{**GOOD, "tools": "{look}"}], ValueError, ("row 0, column 'tools'",)),
    "tools that are a number": Bad([{**GOOD, "tools": 3}], TypeError, ("row 0, column 'tools'",)),
    "template kwargs that are text": Bad(
        [{**GOOD, "chat_template_kwargs": "a"}], TypeError, ("row 0, column 'chat_template_kwargs'",)
    ),
    # tokenizer and template
    "no chat template": Bad([GOOD], ValueError, ("row 0, column 'messages'",), template="none"),
    "no eos token": Bad([{"text": "a"}], ValueError, ("row 0, column 'text'",), special={"eos_token": None}),
    "eos token that is not in the vocabulary": Bad(
        [{"text": "a"}], ValueError, ("eos_token '<|im_ends|>' is not in the",), {"eos_token": "<|im_ends|>"}
    ),
    "template that raises": Bad(
        messages(USER, USER), ValueError, ("row 1, column 'messages'",), template="alternating"
    ),
    "template that cannot take missing content": Bad(
        messages(USER, {"role": "assistant", "tool_calls": [{"function": {"name": "look"}}]}),
        ValueError,
        ("row 1, column 'messages'",),
    ),
    "completion that changes its prompt": Bad(
        [
            {
                "prompt": [USER, {"role": "assistant", "content": "<think>\na\n</think>\n\nb"}],
                "completion": [USER, BLUE],
            }
        ],
        ValueError,
        ("row 0, column 'completion'",),
        template="qwen3_like",
    ),
    # what is trained
    "assistant only on text": Bad([{"text": "a"}], ValueError, ("row 0, column 'text'",), ASSISTANT_ONLY),
    "completion only on text": Bad(
        [{"text": "a"}], ValueError, ("row 0, column 'text'",), {"completion_only_loss": True}
    ),
    "completion only with a formatting function": Bad(
        [{"prompt": "a", "completion": "b"}],
        ValueError,
        ("row 0, column 'text'",),
        {"completion_only_loss": True, "formatting_func": lambda row: row["prompt"]},
    ),
    "formatting function that returns numbers": Bad(
        [{"a": 1}], TypeError, ("row 0, column 'text'",), {"formatting_func": lambda row: 3}
    ),
    "no assistant under assistant only": Bad(
        messages(USER), ValueError, ("row 1, column 'messages'",), ASSISTANT_ONLY
    ),
    "turn without a stop token": Bad(
        [GOOD], ValueError, ("row 0, column 'messages'",), ASSISTANT_ONLY, "no_stop"
    ),
    "template that is not prefix-preserving": Bad(
        [{"messages": [USER, BLUE, USER, BLUE]}],
        ValueError,
        ("row 0, column 'messages'",),
        ASSISTANT_ONLY,
        "qwen3_like",
    ),
    "assistant mask all zero": Bad(
        [GOOD, GOOD], ValueError, ("row 0, column 'input_ids'",), ASSISTANT_ONLY, "marked_nowhere"
    ),
    "prompts longer than max_length": Bad(
        [{"prompt": "Q: How many apples are left?", "completion": " A: 7"}],
        ValueError,
        ("row 0, column 'input_ids'",),
        {"max_length": 2},
    ),
    "one prompt longer than max_length, policy error": Bad(
        [
            {"prompt": "Q:", "completion": " A: 7"},
            {"prompt": "Q: How many apples are left?", "completion": " A"},
        ],
        ValueError,
        ("row 1, column 'input_ids'",),
        {"max_length": 6, "untrained_rows": "error"},
    ),
    # tokens
    "text as tokens": Bad([{"input_ids": "abc"}], TypeError, ("row 0, column 'input_ids'",)),
    "fractions as tokens": Bad([{"input_ids": [0.5]}], TypeError, ("row 0, column 'input_ids'",)),
    "no tokens": Bad([{"input_ids": [5, 6]}, {"input_ids": []}], ValueError, ("row 1, column 'input_ids'",)),
    "completion mask of another length": Bad(
        [{"input_ids": [5, 6], "completion_mask": [0, 1]}, {"input_ids": [5, 6], "completion_mask": [1]}],
        ValueError,
        ("row 1, column 'completion_mask'",),
    ),
    "labels of another length": Bad(
        [{"input_ids": [5, 6], "labels": [5, 6, 7]}], ValueError, ("row 0, column 'labels'",)
    ),
    "labels all masked": Bad(
        [{"input_ids": [5, 6], "labels": [-100, -100]}], ValueError, ("row 0, column 'input_ids'",)
    ),
    "token id out of the vocabulary": Bad(
        [{"input_ids": [5, 6]}, {"input_ids": [5, 100_000]}], ValueError, ("row 1, column 'input_ids'",)
    ),
    "label out of the vocabulary": Bad(
        [{"input_ids": [5, 6], "labels": [-100, 100000]}], ValueError, ("row 0, column 'labels'",)
    ),
    "negative token id": Bad([{"input_ids": [5, -1]}], ValueError, ("row 0", "token id -1")),
    "packing without a length": Bad(
        [{"text": "a"}], ValueError, ("packing=True with max_length=None",), {"packing": True}
    ),
}


def refuse(case: Bad, dataset: Any) -> str:
    tokenizer = tiny_tokenizer(case.template, **case.special)
    with pytest.raises(case.error) as caught:
        rows, _ = prepare_sft_dataset(dataset, tokenizer, SFTPreparation(**case.settings))
        list(rows)
    assert type(caught.value) is case.error
    return str(caught.value)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_stored_rows_are_refused(case: Bad) -> None:
    message = refuse(case, Dataset.from_list(case.rows))
    for words in case.says:
        assert words in message


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_streamed_rows_are_refused_with_the_same_class_and_place(case: Bad) -> None:
    message = refuse(case, IterableDataset.from_generator(lambda: iter(case.rows)))
    for words in case.says:
        assert (
            words.replace("All ", "The first ").replace("rows are", "rows are all") in message
            or words in message
        )


MIXED = {
    "number as text": ([{"text": "a"}, {"text": 3}], TypeError, "row 1, column 'text': 3 is of type int"),
    "list among strings": (
        [{"text": "a"}] * 3 + [{"text": ["b"]}],
        TypeError,
        "row 3, column 'text': a list",
    ),
    "string among messages": ([GOOD, {"messages": "Hello"}], TypeError, "row 1, column 'messages': 'Hello'"),
    "text among conversations": (
        [{"prompt": [USER], "completion": [BLUE]}, {"prompt": "a", "completion": "b"}],
        TypeError,
        "row 1, column 'prompt': 'a' is of type str",
    ),
    "conversations among text": (
        [{"prompt": "a", "completion": "b"}, {"prompt": [USER], "completion": [BLUE]}],
        TypeError,
        "row 1, column 'prompt': a list",
    ),
}


@pytest.mark.parametrize(("rows", "error", "says"), MIXED.values(), ids=MIXED)
def test_mixed_rows_of_a_stream_are_refused_before_the_first_step(rows: list, error: type, says: str) -> None:
    stream: Any = IterableDataset.from_generator(lambda: iter(rows))
    with pytest.raises(error, match=says):
        prepare_sft_dataset(stream, tiny_tokenizer(), SFTPreparation())


def test_the_data_set_is_called_by_its_name() -> None:
    with pytest.raises(ValueError, match="eval dataset, row 0, column 'text'"):
        prepare_sft_dataset(
            Dataset.from_dict({"text": [""]}), tiny_tokenizer(), SFTPreparation(dataset_name="eval")
        )


def test_roles_that_the_template_speaks_of_are_accepted() -> None:
    row = {"messages": [{"role": "narrator", "content": "Once."}, BLUE]}
    prepared, _ = prepare_sft_dataset(
        Dataset.from_list([row]), tiny_tokenizer("marked_nowhere"), SFTPreparation()
    )
    assert len(prepared) == 1


def test_nones_that_storage_added_are_no_errors() -> None:
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"where": "up"}}}],
    }
    rows = [{"messages": [USER, call, {"role": "tool", "content": "blue"}, BLUE]}, GOOD]
    prepared, _ = prepare_sft_dataset(Dataset.from_list(rows), tiny_tokenizer("qwen3_like"), SFTPreparation())
    texts = [tiny_tokenizer().decode(ids) for ids in prepared["input_ids"]]
    assert '"arguments": {"where": "up"}' in texts[0]
    assert "None" not in "".join(texts)
    assert "null" not in "".join(texts)
