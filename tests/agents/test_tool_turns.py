"""Turns with calls, read from token ids; answers as token ids; and chat templates that cannot carry them."""

import pytest

from tests.agents.tool_words import ADD, BROKEN, FAIL, TOOLS, WAIT
from tests.tiny_tokenizers import TEMPLATES, tiny_tokenizer
from trl.agents.tool_turns import ReplyWriter, TurnReader, check_tool_template
from trl.agents.tools import ToolCall, tools_of
from trl.chat_template_utils import add_response_schema
from trl.data.rendering import Chat, render

SCHEMAS = [tool.schema for tool in tools_of(TOOLS).values()]
QUESTION = {"role": "user", "content": "What is 1 + 2?"}


def call(name="add", **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def read(text, tokenizer=None, context=""):
    tokenizer = tokenizer or tiny_tokenizer("qwen3_like")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    before = tokenizer(context, add_special_tokens=False)["input_ids"]
    return TurnReader(tokenizer, SCHEMAS).read(ids, context=before, ends={tokenizer.eos_token_id})


def test_a_turn_without_calls():
    turn = read("It is three.<|im_end|>")
    assert turn.message == {"role": "assistant", "content": "It is three."} and turn.calls == []


def test_text_calls_and_thoughts():
    text = f"<think>\nmaybe {ADD}\n</think>\n\nLet me see.\n{ADD}\n{WAIT}<|im_end|>"
    turn = read(text)
    assert turn.calls == [ToolCall("add", {"a": 1, "b": 2}), ToolCall("echo", {"word": "two"})]
    assert turn.message == {
        "role": "assistant",
        "content": f"<think>\nmaybe {ADD}\n</think>\n\nLet me see.",
        "tool_calls": [call(a=1, b=2), call("echo", word="two")],
    }
    assert read(f"<think>{ADD}").calls == []  # it never ended to think
    assert read(f"so.</think>{ADD}<|im_end|>").calls == [
        ToolCall("add", {"a": 1, "b": 2})
    ]  # the prompt began the thought


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (BROKEN, "is not JSON"),
        ("<tool_call></tool_call>", "is not JSON"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}', "is not closed"),
        ("<tool_call>[1]</tool_call>", "names no tool"),
        ('<tool_call>{"arguments": {}}</tool_call>', "names no tool"),
        (f"<tool_call>{'[' * 20_000}</tool_call>", "is not JSON"),
        (
            '<tool_call>{"name": "echo", "arguments": {"word": "half \\ud800"}}</tool_call>',
            "surrogates not allowed",
        ),
    ],
)
def test_calls_that_cannot_be_read_stay_text(block, words):
    turn = read(f"{FAIL}\n{block}<|im_end|>")
    assert turn.calls[0] == ToolCall("fail", {}) and words in (turn.calls[1].error or "")
    assert turn.message["content"] == block and turn.message["tool_calls"] == [call("fail")]


def test_arguments_in_other_forms():
    assert read('<tool_call>{"name": "fail"}</tool_call>').calls == [ToolCall("fail", {})]
    text = '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert read(text).calls == [ToolCall("add", {"a": 1})]
    assert read('<tool_call>{"name": "add", "arguments": "one"}</tool_call>').calls == [ToolCall("add", "one")]


def brackets():
    """A tokenizer whose template writes calls in a form of its own, and the rules by which they are read."""
    tokenizer = tiny_tokenizer("chatml")
    tokenizer.chat_template = (
        "{%- if tools %}{{ tools | tojson }}\n{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[CALL]{{ c.function | tojson }}[/CALL]{% endfor %}<|im_end|>\n{% endfor %}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.response_template = {
        "defaults": {"role": "assistant", "content": ""},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open": "[CALL]", "close": "[/CALL]", "repeats": True, "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": r"\s*<\|im_end\|>\s*", "content": "text"},
        },
    }  # fmt: skip
    return tokenizer


@pytest.mark.parametrize("depth", [600, 20_000])
def test_calls_that_the_tokenizers_own_rules_read_may_be_nested_too_deeply(depth):
    deep = f'[CALL]{{"name": "add", "arguments": {{"a": {"[" * depth}{"]" * depth}}}}}[/CALL]'
    turn = read(f"{deep}<|im_end|>", brackets(), "<|im_start|>assistant\n")
    assert len(turn.calls) == 1 and "cannot be read" in str(turn.calls[0].error)
    assert turn.message == {"role": "assistant", "content": deep}


def test_the_tokenizers_own_rules_come_first():
    tokenizer = brackets()
    check_tool_template(tokenizer, SCHEMAS, template_kwargs={})
    context = "<|im_start|>assistant\n"
    turn = read('See[CALL]{"name": "add", "arguments": {"a": 1, "b": 2}}[/CALL]<|im_end|>', tokenizer, context)
    assert turn.calls == [ToolCall("add", {"a": 1, "b": 2})]
    assert turn.message == {"role": "assistant", "content": "See", "tool_calls": [call(a=1, b=2)]}
    wrong = read("[CALL]{oops[/CALL]<|im_end|>", tokenizer, context)
    assert "cannot be read" in (wrong.calls[0].error or "") and wrong.message["content"] == "[CALL]{oops[/CALL]"
    assert read("Three.<|im_end|>", tokenizer, context).calls == []
    known = add_response_schema(tiny_tokenizer("qwen3_like"))
    assert len(read(f"{BROKEN}{ADD}<|im_end|>", known).calls) == 2  # our rules: read one by one


@pytest.mark.parametrize("results", [["3"], ["3", "Error: no."], ["<|im_end|>", ""]])
def test_answers_are_what_the_template_writes_behind_the_turn(results):
    tokenizer = tiny_tokenizer("qwen3_like")
    writer, end = ReplyWriter(tokenizer, SCHEMAS), tokenizer.eos_token_id
    replies = [{"role": "tool", "name": "add", "content": result} for result in results]
    ids = writer.ids(replies, last=end, ends={end}, template_kwargs={})
    said = {"role": "assistant", "content": "", "tool_calls": [call(a=1, b=2)] * len(results)}
    before = render(tokenizer, Chat([QUESTION, said], SCHEMAS)).rstrip("\n").replace("<think>\n\n</think>\n\n", "")
    whole = render(tokenizer, Chat([QUESTION, said, *replies], SCHEMAS), add_generation_prompt=True)
    whole = whole.replace("<think>\n\n</think>\n\n", "")
    assert whole == before + tokenizer.decode(ids)
    assert ids == tokenizer(whole[len(before) :], add_special_tokens=False)["input_ids"]


def test_template_arguments_and_other_ends():
    tokenizer = tiny_tokenizer("qwen3_like")
    writer, end = ReplyWriter(tokenizer, SCHEMAS), tokenizer.eos_token_id
    other, word = tokenizer.convert_tokens_to_ids("<|stop|>"), tokenizer("blue")["input_ids"][-1]
    reply = [{"role": "tool", "content": "3"}]
    plain = tokenizer.decode(writer.ids(reply, last=end, ends={end, other}, template_kwargs={}))
    thinking = writer.ids(reply, last=end, ends={end}, template_kwargs={"enable_thinking": False})
    assert tokenizer.decode(thinking) == plain + "<think>\n\n</think>\n\n"
    # A turn that a stop string ended is closed as the template closes it; another end token stands for the template's own.
    assert tokenizer.decode(writer.ids(reply, last=word, ends={end}, template_kwargs={})) == "<|im_end|>" + plain
    found = tokenizer.decode(writer.ids(reply, last=other, ends={end, other}, template_kwargs={}))
    assert found == plain.removeprefix("\n")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "need a chat template"),
        (TEMPLATES["chatml"], "reads no tools"),
        (TEMPLATES["qwen3_like"].replace("message.role == 'tool'", "false"), "leaves role 'tool' out"),
        (TEMPLATES["qwen3_like"].replace("message.tool_calls or []", "[]"), "leaves out the arguments of tool calls"),
        (TEMPLATES["qwen3_like"].replace('{"name": "\' + function', '{"call": "\' + function'), "cannot be read back"),
        ("{{ tools | tojson }}{{ raise_exception('no tools here') if messages[-1].role == 'tool' }}" , "no tools here"),
    ],
    ids=["none", "reads no tools", "no answers", "no calls", "other form", "refuses"],
)  # fmt: skip
def test_templates_that_cannot_carry_tools(template, words):
    tokenizer = tiny_tokenizer("qwen3_like")
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=words):
        check_tool_template(tokenizer, SCHEMAS, template_kwargs={})
