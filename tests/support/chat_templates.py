"""Chat templates as models publish them, in short, and bodies to render."""

from __future__ import annotations

from typing import Any

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Qwen's way: tools as JSON, arguments of calls, loop controls, thinking switched off by a variable.
TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and tools %}{% continue %}{% endif %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- if message.reasoning_content and loop.index0 > ns.last %}
            {{- '<think>' + message.reasoning_content + '</think>' }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# Llama's way: the template writes the BOS token, knows the date, and goes through parts of content.
PARTS = """\
{{- bos_token }}
{%- set date = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{%- macro text_of(content) %}
    {%- if content is string %}{{- content | trim }}{%- else %}
        {%- for part in content %}{%- if part.type == 'text' %}{{- part.text }}{%- endif %}{%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role ' + message['role']) }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'system' %}{{- 'Today: ' + (date | length | string) + '\\n' }}{%- endif %}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- text_of(message['content']) }}
        {%- endgeneration %}
    {%- else %}
        {{- text_of(message['content']) }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

TEMPLATES = {"chatml": CHATML, "tools": TOOLS, "parts": PARTS}

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city: <b>now</b>, é",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SYSTEM = {"role": "system", "content": "You help."}
USER = {"role": "user", "content": "What is 12,5 % of 日本語 naïve <|im_end|> 😀?"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln", "n": [1, 2]}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "12 °C"}]}

BODIES: dict[str, dict[str, Any]] = {
    "one": {"messages": [USER]},
    "turns": {
        "messages": [SYSTEM, USER, {"role": "assistant", "content": "1,5"}, {"role": "user", "content": " and?"}]
    },
    "parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "2"}]}]
    },
    "no prompt": {"messages": [SYSTEM, USER], "add_generation_prompt": False},
    "continued": {
        "messages": [USER, {"role": "assistant", "content": "The answer is  "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "settings": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
    "effort": {"messages": [USER], "reasoning_effort": "none"},
    "tools": {"messages": [SYSTEM, USER], "tools": [WEATHER]},
    "calls": {"messages": [SYSTEM, USER, CALL, RESULT], "tools": [WEATHER]},
    "bare tool": {"messages": [USER], "tools": [{"type": "function", "function": {"name": "noop"}}]},
    "thoughts": {"messages": [USER, {"role": "assistant", "content": "x", "reasoning": "because"}]},
    "billed": {"messages": [{"role": "system", "content": "x-anthropic-billing-header: 7\nYou help."}, USER]},
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, USER]},
    "developers": {"messages": [SYSTEM, USER, {"role": "developer", "content": "Be brief."}]},
    "empty": {"messages": [{"role": "user", "content": ""}]},
    "long word": {"messages": [{"role": "user", "content": "etaoin" * 300}]},
}
