"""A tokenizer some of whose tokens are whole calls of tools, so that models of random weights make them; and the tools."""

import asyncio

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

ADD = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
WAIT = '<tool_call>{"name": "echo", "arguments": {"word": "two"}}</tool_call>'
FAIL = '<tool_call>{"name": "fail", "arguments": {}}</tool_call>'
BROKEN, UNKNOWN = "<tool_call>{oops}</tool_call>", '<tool_call>{"name": "fly", "arguments": {}}</tool_call>'
MISFIT = '<tool_call>{"name": "add", "arguments": {"a": "x", "b": 2}}</tool_call>'
MORE = tuple(ADD.replace("1", str(number)) for number in range(3, 9))  # so that calls are frequent
CALLS = (ADD, WAIT, FAIL, BROKEN, UNKNOWN, MISFIT, *MORE)
MARKS = ("<pad>", "<unk>", "</s>", "<tools>", "<user>", "<assistant>", "<system>", "<tool>")
WORDS = ("add", "echo", "fail", "What", "is", "one", "two", "three", "3", "Error:", "yes", "no", "?", "hi")
TEMPLATE = (
    "{% if tools %}<tools> {% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}</tool_call> '
    "{% endfor %}</s> {% endfor %}{% if add_generation_prompt %}<assistant> {% if hint %}{{ hint }} {% endif %}{% endif %}"
)


def call_tokenizer() -> PreTrainedTokenizerFast:
    """Ids are those of `MARKS`, `WORDS`, then `CALLS`; words are split at white space; `</s>` ends a turn."""
    names = [*MARKS, *WORDS]
    backend = Tokenizer(WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # type: ignore[assignment]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in MARKS])
    backend.add_tokens([AddedToken(name, normalized=False) for name in CALLS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The one.
        b: The other.
    """
    return a + b


async def echo(word: str) -> dict:
    """Says a word again.

    Args:
        word: What to say.
    """
    await asyncio.sleep(0.001)
    return {"said": word}


def fail() -> str:
    """Never works."""
    raise OSError("no such luck")


TOOLS = [add, echo, fail]
