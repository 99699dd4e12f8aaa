"""Tiny byte-level BPE tokenizers trained in memory, with the chat templates whose quirks the tests are about."""

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<s>", "<|im_end|>", "<|im_start|>", "<|stop|>")

CORPUS = (
    "What colour is the sky? It is blue. user assistant system tool Be brief. The ferryman counted two wooden oars.",
    "Q: How many apples are left? A: Seven apples and 12 pears. And then? Look up. Next. The answer is 42.",
    "<think> </think> <tool_call> </tool_call> name arguments look where up",
)

CHATML = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

MARKED = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m['role'] + '\\n' -}}{%- if m['role'] == 'assistant' -%}"
    "{%- generation -%}{{- m['content'] + '<|im_end|>' -}}{%- endgeneration -%}{%- else -%}"
    "{{- m['content'] + '<|im_end|>' -}}{%- endif -%}{{- '\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

# Qwen3's template, written anew from what it renders: <think> stays in the turns after the last question only (a user message
# that is a tool's result is none), and of those the last turn always has one, the others where they have reasoning.
QWEN3_LIKE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\nYou are provided with function signatures within <tools></tools> XML tags:\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == 'user' and message.content is string and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if content or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- set function = call.function or call %}
            {%- set arguments = function.arguments if function.arguments is string else function.arguments | tojson %}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' + arguments + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

TEMPLATES: dict[str, str | None] = {
    "chatml": CHATML,
    "marked": MARKED,
    "marked_without_stop": MARKED.replace(
        "{{- m['content'] + '<|im_end|>' -}}{%- endgeneration -%}",
        "{{- m['content'] -}}{%- endgeneration -%}{{- '<|im_end|>' -}}",
    ),
    "marked_stopless": MARKED.replace(
        "{{- m['content'] + '<|im_end|>' -}}{%- endgeneration -%}",
        "{{- m['content'] -}}{%- endgeneration -%}",
    ),
    "marked_nowhere": MARKED.replace("{%- if m['role'] == 'assistant' -%}", "{%- if m['role'] == 'narrator' -%}"),
    "begin": "{{- bos_token -}}" + CHATML,
    # The stop token of a message is written only when another message follows.
    "stop_in_next": (
        "{%- for m in messages -%}{%- if not loop.first -%}{{- '<|im_end|>\\n' -}}{%- endif -%}"
        "{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_end|>\\n<|im_start|>assistant\\n' -}}{%- endif -%}"
    ),
    "no_stop": (
        "{%- for m in messages -%}{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    ),
    # Not the eos token, but a special token that only closes turns.
    "other_stop": CHATML.replace("<|im_end|>", "<|stop|>"),
    "no_generation_prompt": CHATML.split("{%- if add_generation_prompt -%}")[0],
    # The generation prompt opens a thought that finished conversations do not have.
    "opens_thought": CHATML.replace("<|im_start|>assistant\\n' -}}", "<|im_start|>assistant\\n<think>\\n' -}}"),
    "alternating": (
        "{%- for m in messages -%}{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
        "{{- raise_exception('roles must alternate') -}}{%- endif -%}"
        "{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    ),
    "qwen3_like": QWEN3_LIKE,
    "none": None,
}


@cache
def _trained_backend() -> str:
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],  # type: ignore[arg-type]
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 20, trainer)
    return backend.to_str()


def tiny_tokenizer(template: str = "chatml", *, adds_begin: bool = False, **special: Any) -> PreTrainedTokenizerFast:
    """A fresh tokenizer of 400 tokens with one of `TEMPLATES`; eos `<|im_end|>`, pad `<pad>`, begin `<s>`.

    `adds_begin`: it writes `<s>` itself, as Llama's does. `special` overrides tokens; None takes one away.
    """
    backend = Tokenizer.from_str(_trained_backend())
    if adds_begin:
        backend.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    names = {"eos_token": "<|im_end|>", "pad_token": "<pad>", "bos_token": "<s>", **special}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, **{name: token for name, token in names.items() if token is not None}
    )
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer
