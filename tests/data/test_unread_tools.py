"""Tools that a chat template does not show are reported once by every kind of preparation."""

import json
import logging

import pytest
from datasets import Dataset, IterableDataset
from tests.models.words import word_tokenizer

from trl.data.formats import written
from trl.data.pipeline import prepare_dataset
from trl.data.preference import PreferencePreparation, RewardPreparation
from trl.data.prompts import PromptPreparation, PromptSets
from trl.data.text import SFTPreparation
from trl.data.unpaired import UnpairedPreparation
from trl.data.validation import Place, check_messages

SPOKEN = "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' </s> ' }}{% endfor %}"
SHOWING = "{% if tools %}{{ 'tools ' }}{% endif %}" + SPOKEN
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
HAVE = (json.dumps([TOOL]), "[]", None, json.dumps([TOOL]))  # two of four


def tokenizer(template=SPOKEN):
    found = word_tokenizer(eos_token="</s>", pad_token="<pad>", bos_token="<s>")
    found.chat_template = template
    return found


def said(text, role="assistant"):
    return [{"role": role, "content": text}]


def with_tools(**columns):
    return Dataset.from_list([{**columns, "tools": own} for own in HAVE])


ASKED = said("the cat", "user")
PAIRS = {"prompt": ASKED, "chosen": said("sat"), "rejected": said("on the mat")}
KINDS = {
    "sft": (
        {"messages": ASKED + said("sat")},
        lambda rows, words: prepare_dataset(rows, words, SFTPreparation(max_length=None)),
    ),
    "pairs": (PAIRS, lambda rows, words: prepare_dataset(rows, words, PreferencePreparation())),
    "reward": (PAIRS, lambda rows, words: prepare_dataset(rows, words, RewardPreparation())),
    "unpaired": (
        {"prompt": ASKED, "completion": said("sat"), "label": True},
        lambda rows, words: prepare_dataset(rows, words, UnpairedPreparation()),
    ),
    "prompts": (
        {"prompt": ASKED},
        lambda rows, words: PromptSets(words, PromptPreparation(), context_length=None, room=("", None))(rows, "train"),
    ),
}


def warnings_of(caplog, prepare, rows, template=SPOKEN):
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        prepare(rows, tokenizer(template))
    return [record.getMessage() for record in caplog.records if "tools" in record.getMessage()]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_whose_tools_the_template_leaves_out(kind, caplog):
    columns, prepare = KINDS[kind]
    (warning,) = warnings_of(caplog, prepare, with_tools(**columns))
    assert "train dataset: the prompts do not show the rows' tools" in warning
    assert "the chat template reads none" in warning
    assert not warnings_of(caplog, prepare, with_tools(**columns), SHOWING)
    assert not warnings_of(caplog, prepare, with_tools(**columns).remove_columns("tools"))
    named = {"default": SPOKEN, "tool_use": SHOWING}
    assert not warnings_of(caplog, prepare, with_tools(**columns), named)


def test_tools_given_for_all_rows(caplog):
    def prepare(rows, words):
        return prepare_dataset(rows, words, PreferencePreparation(tools=[TOOL]))

    rows = Dataset.from_list([PAIRS] * 2)
    (warning,) = warnings_of(caplog, prepare, rows)
    assert "because the chat template reads none" in warning
    assert not warnings_of(caplog, prepare, rows, SHOWING)
    text = Dataset.from_list([{"prompt": "the cat", "chosen": " sat", "rejected": " on"}])
    (warning,) = warnings_of(caplog, prepare, text, SHOWING)
    assert "only conversations are rendered with tools" in warning


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_the_template_leaves_out(kind, caplog):
    columns, prepare = KINDS[kind]
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "look"}}]}
    name = next(name for name in ("messages", "prompt", "chosen") if isinstance(columns.get(name), list))
    called = {**columns, name: [columns[name][0], call, {"role": "tool", "content": "up"}, *columns[name]]}

    def warned(row, template):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            prepare(Dataset.from_list([columns, row]), tokenizer(template))
        return "train dataset: the messages' tool calls are not shown" in caplog.text

    assert warned(called, SPOKEN) and not warned(called, SPOKEN + "{# tool_calls #}") and not warned(columns, SPOKEN)


def test_a_stream_is_judged_by_its_first_row(caplog):
    columns, prepare = KINDS["sft"]
    stream = IterableDataset.from_generator(lambda: iter(with_tools(**columns)))
    (warning,) = warnings_of(caplog, prepare, stream)
    assert "train dataset: the prompts do not show" in warning


JSON_CALLS = "{% for m in messages %}{{ m['role'] }} {% for c in m.tool_calls or [] %}{{ ARGUMENTS }}{% endfor %} </s> {% endfor %}"


@pytest.mark.parametrize("expression", ["c.function.arguments | tojson", "c.function | tojson"])
def test_arguments_of_calls_as_json_text_are_encoded_once(expression):
    template = JSON_CALLS.replace("ARGUMENTS", expression)

    def messages_of(arguments):
        calls = [{"type": "function", "function": {"name": "look", "arguments": arguments}}]
        place = Place("train", 0, "messages")
        return check_messages([*ASKED, {"role": "assistant", "tool_calls": calls}], place, template=template)

    assert messages_of('{"at": 1, "to": null}') == messages_of(written({"at": 1, "to": None}))
    for kept in ("not JSON", "[1]", ""):
        assert messages_of(kept)[1]["tool_calls"][0]["function"]["arguments"] == kept


def test_a_template_that_writes_text_as_it_is_gets_text():
    template = JSON_CALLS.replace("ARGUMENTS", "'```' + c.function.arguments + '```'")  # as DeepSeek's
    calls = [{"type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}]
    turns = [*ASKED, {"role": "assistant", "tool_calls": calls}]
    assert check_messages(turns, Place("train", 0, "messages"), template=template)[1]["tool_calls"] == calls


@pytest.mark.parametrize("kind", ["sft", "pairs"])
def test_answers_that_the_template_cuts_are_counted(kind, caplog):
    cut = SPOKEN.replace("message['content']", "message['content'].split('</think>')[-1]")
    thought = said("<think> mat </think> sat")
    columns = {"sft": {"messages": ASKED + thought}, "pairs": {**PAIRS, "chosen": thought}}[kind]
    for template, count in ((SPOKEN, 0), (cut, 1)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            _, report = KINDS[kind][1](Dataset.from_list([columns, KINDS[kind][0]]), tokenizer(template))
        assert report.hidden_answers == count and caplog.text.count("leaves out a part of the answer") == count


def test_a_column_of_system_prompts_is_not_read_silently(caplog):
    KINDS["sft"][1](Dataset.from_list([{**KINDS["sft"][0], "system": "Be brief."}]), tokenizer())
    assert "the column 'system' is not read" in caplog.text
