"""Data sets prepared for supervised fine-tuning: stored and streaming alike, counted, packed, cached."""

import json
import logging
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from tests.tiny_tokenizers import tiny_tokenizer

from trl.data.pipeline import prepare_dataset
from trl.data.text import SFTPreparation, SFTTokenizer
from trl.data.validation import RowType

TALK = [
    {"role": "user", "content": "What colour is the sky?"},
    {"role": "assistant", "content": "It is blue."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "Look up."},
]
PAIRS = [
    {"prompt": "Q: How many apples?", "completion": " A: 7"},
    {"prompt": "Q: " + "How many apples? " * 8, "completion": " A: 12"},
    {"prompt": "Q: And pears?", "completion": " A: Seven apples and 12 pears. Look up. " * 4},
]


def prepare(rows: list[dict], *, streaming: bool = False, template: str = "chatml", **settings: Any) -> Any:
    dataset: Any = Dataset.from_list(rows)
    if streaming:
        dataset = dataset.to_iterable_dataset()
    return prepare_dataset(dataset, tiny_tokenizer(template), SFTPreparation(**settings))


def test_report_counts_truncation_and_untrained_rows(caplog: pytest.LogCaptureFixture) -> None:
    whole, _ = prepare(PAIRS)
    lengths = [len(ids) for ids in whole["input_ids"]]
    limit = lengths[0]
    with caplog.at_level(logging.WARNING):
        rows, report = prepare(PAIRS, max_length=limit)
    removed = sum(max(length - limit, 0) for length in lengths)
    assert (report.rows, report.truncated_rows, report.removed_tokens) == (3, 2, removed)
    assert report.tokens == sum(lengths) - removed == sum(len(ids) for ids in rows["input_ids"])
    assert (report.untrained_rows, report.dropped_rows) == (1, 0)
    assert "in 1 of 3 rows (first: [1]) no trained token is left. Raise max_length" in caplog.text
    assert report.summary() == (
        f"train dataset: 3 rows, {report.tokens} tokens, 2 truncated rows, {removed} removed tokens, 1 untrained rows"
    )


def test_policies_for_untrained_rows() -> None:
    kept, _ = prepare(PAIRS, max_length=30)
    assert len(kept) == 3
    rows, report = prepare(PAIRS, max_length=30, untrained_rows="drop")
    assert list(rows) == [kept[0], kept[2]]
    assert (report.untrained_rows, report.dropped_rows) == (1, 1)
    for streaming in (False, True):
        with pytest.raises(ValueError, match=r"train dataset, row 1, column 'input_ids': none .* Raise max_length"):
            prepare(PAIRS, max_length=30, untrained_rows="error", streaming=streaming)


def test_the_first_token_of_a_row_is_not_a_trained_one() -> None:
    rows = {"input_ids": [[7, 8, 9], [7], [7, 8]], "completion_mask": [[1, 1, 0], [1], [0, 1]]}
    kind = SFTTokenizer(tiny_tokenizer(), RowType("tokens", ("input_ids",)), "train", max_length=2)
    numbers = kind.numbers(rows, 5)
    assert numbers["row"].tolist() == [5, 6, 7]
    assert numbers["tokens"].tolist() == [2, 1, 2]
    assert numbers["removed_tokens"].tolist() == [1, 0, 0]
    assert numbers["untrained_rows"].tolist() == [0, 1, 0]


def test_packing_loses_no_token() -> None:
    whole, _ = prepare(PAIRS)
    for strategy in ("bfd", "wrapped"):
        packed, report = prepare(PAIRS, max_length=150, packing=True, packing_strategy=strategy)
        assert sorted(chain(*packed["input_ids"])) == sorted(chain(*whole["input_ids"]))
        assert sum(map(sum, packed["completion_mask"])) == sum(map(sum, whole["completion_mask"]))
        assert report.truncated_rows == 0


def test_prepared_twice_is_read_from_the_cache(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    for _ in range(2):
        dataset: Any = Dataset.from_json(str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path / "cache"))
        prepared = [prepare_dataset(dataset, tiny_tokenizer(), SFTPreparation(max_length=30)) for _ in range(2)]
        assert len({rows._fingerprint for rows, _ in prepared}) == 1
        assert prepared[0][1] == prepared[1][1]
    other, _ = prepare_dataset(dataset, tiny_tokenizer("marked"), SFTPreparation(max_length=30))
    assert other._fingerprint != prepared[0][0]._fingerprint


def test_two_processes_count_and_number_rows_as_one() -> None:
    rows = [{"text": f"Look up {number}."} for number in range(20)]
    alone, counted = prepare(rows)
    together, report = prepare(rows, num_proc=2)
    assert (together["input_ids"][:], report) == (alone["input_ids"][:], counted)
    with pytest.raises(ValueError, match="row 15, column 'text'"):
        prepare([*rows[:15], {"text": ""}, *rows[16:]], num_proc=2)


def by_row(row: dict) -> str:
    return f"Q: {row['question']} A: {row['answer']}"


def by_batch(batch: dict) -> list[str]:
    return [f"Q: {q} A: {a}" for q, a in zip(batch["question"], batch["answer"])]  # noqa: B905


@pytest.mark.parametrize("streaming", [False, True])
def test_formatting_functions_of_rows_and_of_batches(streaming: bool) -> None:
    rows = [{"question": "And then", "answer": "Look up"}, {"question": "a", "answer": "b"}]
    expected, _ = prepare([{"text": by_row(row)} for row in rows])
    for function in (by_row, by_batch):
        prepared, _ = prepare(rows, formatting_func=function, streaming=streaming)
        assert list(prepared) == list(expected)


def test_a_formatting_function_sees_masks() -> None:
    rows = [{"q_input_ids": [1, 2, 3], "q_attention_mask": [0, 1, 1], "answer": "Look up"}]
    seen = []

    def function(row: dict) -> str:
        seen.append((row["q_input_ids"], row["q_attention_mask"]))
        return row["answer"]

    prepared, _ = prepare(rows, formatting_func=function)
    assert seen[0] == ([1, 2, 3], [0, 1, 1])
    assert list(prepared) == list(prepare([{"text": "Look up"}])[0])


def by_batch_of_numbers(batch: dict) -> list[str]:
    return [f"number {number}" for number in batch["number"]]  # TypeError for a row


def test_a_function_of_batches_may_fail_on_a_row() -> None:
    function = by_batch_of_numbers
    rows = [{"number": 3, "names": ["a", "b"]}, {"number": 4, "names": ["c", "d"]}]
    texts = [function({"number": [row["number"]], "names": [row["names"]]})[0] for row in rows]
    expected, _ = prepare([{"text": text} for text in texts])
    assert list(prepare(rows, formatting_func=function)[0]) == list(expected)


def by_missing(row: dict) -> str:
    return row["qestion"]


def by_pairs(row: dict) -> list[str]:
    return ["one", "two"]


@pytest.mark.parametrize(
    ("function", "outcome"),
    [
        (by_missing, "formatting_func raised KeyError: 'qestion', expected a string."),
        (by_pairs, "formatting_func returned \"['one', 'two']\" of type list, expected a string."),
    ],
)
def test_a_formatting_function_that_makes_no_text_is_told_what_it_is_given(function, outcome) -> None:
    with pytest.raises(TypeError) as caught:
        prepare([{"question": "Why?", "answer": "So."}], formatting_func=function)
    assert f"row 0, column 'text': {outcome}" in str(caught.value)
    assert "columns ['answer', 'question']" in str(caught.value)


def test_another_eos_token_is_used_without_changing_the_tokenizer() -> None:
    tokenizer = tiny_tokenizer()
    rows, _ = prepare_dataset(Dataset.from_dict({"text": ["Blue."]}), tokenizer, SFTPreparation(eos_token="<|stop|>"))
    assert rows[0]["input_ids"][-1] == tokenizer.convert_tokens_to_ids("<|stop|>")
    assert tokenizer.eos_token == "<|im_end|>"


def test_tools_and_template_kwargs_columns_reach_the_template() -> None:
    look = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}
    rows = [
        {"prompt": TALK[:1], "completion": TALK[1:2], "tools": json.dumps([look])},
        {"prompt": TALK[:1], "completion": TALK[1:2], "tools": json.dumps([])},
    ]
    prepared, _ = prepare(rows, template="qwen3_like")
    texts = [tiny_tokenizer().decode(ids) for ids in prepared["input_ids"]]
    assert '"name": "look"' in texts[0]
    assert "# Tools" not in texts[1]


def test_marks_without_stop_token_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    for streaming in (False, True):
        caplog.clear()
        rows, report = prepare(
            [{"messages": TALK}] * 200,
            template="marked_stopless",
            assistant_only_loss=True,
            streaming=streaming,
        )
        assert len(list(rows)) == 200
        assert report.unstopped_rows == 200
        assert caplog.text.count("ends without a stop token") == 1


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_tokenized_streams_of_tensors_and_masks_of_truth_values(kind: str) -> None:
    row = {"input_ids": [5, 6, 7, 8], "completion_mask": [False, True, True, True]}
    short = {name: values[:2] for name, values in row.items()}
    stream = Dataset.from_list([row, short]).to_iterable_dataset().with_format(kind)
    prepared, report = prepare_dataset(stream, tiny_tokenizer(), SFTPreparation(max_length=3))
    expected = [{name: values[:3] for name, values in row.items()}, short]
    assert [{name: values.tolist() for name, values in each.items()} for each in prepared] == expected
    assert (report.rows, report.removed_tokens) == (2, 1)


def test_stored_masks_of_truth_values() -> None:
    rows = [
        {"input_ids": [5, 6, 7], "completion_mask": [False, True, True]},
        {"input_ids": [5, 6], "completion_mask": [True, False]},
    ]
    prepared, report = prepare(rows)
    assert list(prepared) == rows and (report.rows, report.tokens, report.untrained_rows) == (2, 5, 1)


def test_a_stream_goes_on_after_a_checkpoint() -> None:
    rows = [{"text": f"Look up {number}."} for number in range(150)]
    stream, _ = prepare(rows, streaming=True)
    iterator = iter(stream)
    for _ in range(70):
        next(iterator)
    state, expected = stream.state_dict(), list(iterator)
    again, _ = prepare(rows, streaming=True)
    again.load_state_dict(state)
    assert list(again) == expected


def test_unpaired_preferences_are_trained_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    rows, _ = prepare([{**row, "label": False} for row in PAIRS])
    assert rows.column_names == ["input_ids", "completion_mask"]
    assert "KTOTrainer" in caplog.text
