"""Chat templates for training: every message renders the same whatever follows, and assistant text is marked.

The marked text begins after the generation prompt and ends with the stop token.
"""

CHATML_TRAINING_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# The wording of the tool instructions is Qwen3's own: the models were trained on it.
QWEN3_TRAINING_TEMPLATE = """\
{%- set ns = namespace(first=0, in_tools=false) %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments ' }}
    {{- 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
    {%- if messages and messages[0].role == 'system' %}
        {%- set ns.first = 1 %}
    {%- endif %}
{%- endif %}
{%- for message in messages[ns.first:] %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'tool' %}
        {%- if not ns.in_tools %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {%- set ns.in_tools = true %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[ns.first + loop.index].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
            {%- set ns.in_tools = false %}
        {%- endif %}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if message.reasoning_content is not string and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- for call in message.tool_calls or [] %}
            {%- if content or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {%- set function = call.function if call.function else call %}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {%- if function.arguments is string %}
                {{- function.arguments }}
            {%- else %}
                {{- function.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# Qwen3's own, for generation: only turns behind the last question keep `<think>`, an empty one in the last turn alone.
QWEN3_TEMPLATE = """\
{%- set asked = namespace(at=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- set is_answer = message.content is string and message.content.startswith('<tool_response>') and \
message.content.endswith('</tool_response>') %}
    {%- if not asked.found and message.role == 'user' and message.content is string and not is_answer %}
        {%- set asked.found = true %}
        {%- set asked.at = messages|length - loop.index %}
    {%- endif %}
{%- endfor %}
""" + QWEN3_TRAINING_TEMPLATE.replace("        {%- generation %}\n", "").replace(
    "        {%- endgeneration %}\n", ""
).replace(
    "        {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}\n",
    """\
        {%- if ns.first + loop.index0 > asked.at and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
""",
)

SIMPLE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].capitalize() ~ ': ' ~ message['content'] ~ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
SIMPLE_SFT_CHAT_TEMPLATE = "{% for message in messages %}{{ ' ' ~ message['content'] }}{% endfor %}{{ eos_token }}"
