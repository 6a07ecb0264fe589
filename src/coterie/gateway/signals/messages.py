"""Messages of a chat body, in the form in which vLLM passes them to a model's chat template.

Token ids equal the worker's only if the messages do: content parts are joined or wrapped, arguments of tool calls are
parsed, tools get the fields of vLLM's schema, and the role developer becomes system if the template does not know it.
Content that is not text (images, audio) has no token ids here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from coterie.errors import InputError, check

_TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Type of a content part → the field that holds its text."""
_BILLING = "x-anthropic-billing-header"
"""Start of a line that vLLM drops from system messages, as it differs in each request."""


class NoTokensError(InputError):
    """The token ids of a body cannot be known; the message says why."""


def messages_of(body: Mapping[str, Any], *, wrapped: bool, separator: str = "\n") -> list[dict[str, Any]]:
    """Return the messages for a template. `wrapped`: whether the template iterates over content parts itself."""
    messages: Any = body.get("messages")
    check(isinstance(messages, list) and messages, "messages must be a list of at least one message", NoTokensError)
    return [_message(message, wrapped, separator) for message in messages]


def tools_of(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools with the fields of vLLM's schema, in its order; None if there are none."""
    tools: Any = body.get("tools")
    if tools is None:
        return None
    check(isinstance(tools, list) and tools, "tools must be a list of at least one tool", NoTokensError)
    return [_tool(tool) for tool in tools]


def template_settings(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's variables: the body's fields override `chat_template_kwargs`, which override tools."""
    check(body.get("chat_template") is None, "the request brings its own chat template", NoTokensError)
    given = body.get("chat_template_kwargs") or {}
    if not isinstance(given, dict) or {"chat_template", "tokenize", "messages", "conversation"} & given.keys():
        raise NoTokensError("chat_template_kwargs must be an object without a template, messages or tokenize")
    effort = body.get("reasoning_effort")
    own = {
        "add_generation_prompt": _flag(body, "add_generation_prompt", True),
        "continue_final_message": _flag(body, "continue_final_message", False),
        "documents": body.get("documents"),
        "reasoning_effort": None if effort == "auto" else effort,
        "enable_thinking": None if effort is None or "enable_thinking" in given else effort != "none",
    }
    tools = tools_of(body)
    settings = {"tools": tools, **given} if tools is not None else dict(given)
    return settings | {name: value for name, value in own.items() if value is not None}


def developer_as_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn developer messages into system messages, and merge these into one at the start.

    For templates that do not know the role developer; without such messages nothing changes.
    """
    if not any(message["role"] == "developer" for message in messages):
        return messages
    changed = [
        {**{key: value for key, value in message.items() if key != "tools"}, "role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    systems = [message for message in changed if message["role"] == "system"]
    if len(systems) == 1 and changed[0] is systems[0]:
        return changed
    texts = [text for message in systems if (text := _joined(message.get("content", "")))]
    return [
        {"role": "system", "content": "\n\n".join(texts)},
        *(message for message in changed if message["role"] != "system"),
    ]


def _message(message: Any, wrapped: bool, separator: str) -> dict[str, Any]:
    check(
        isinstance(message, dict) and isinstance(message.get("role"), str),
        'a message must be an object such as {"role": "user", "content": "…"}',
        NoTokensError,
    )
    role, content = message["role"], message.get("content")
    parts = [] if content is None else [content] if isinstance(content, str) else content
    check(isinstance(parts, list), "content must be a text or a list of parts", NoTokensError)
    texts = [text for part in parts if (text := _text_of(part)) is not None]
    if role == "system":
        texts = list(_without_billing(texts))
    # vLLM omits empty texts, except in a tool message if content is wrapped.
    joined = ("\n" if wrapped else separator).join(texts if wrapped else filter(None, texts))
    listed = wrapped and role != "tool"
    return {
        "role": role,
        "content": [{"type": "text", "text": text} for text in texts] if listed else joined,
        **(_spoken(message) if role == "assistant" else {}),
        **{key: message[key] for key in ("tool_call_id",) if role == "tool" and key in message},
        **{key: message[key] for key in ("name", "task") if isinstance(message.get(key), str)},
        **({"tools": message.get("tools")} if role == "developer" else {}),
    }


def _text_of(part: Any) -> str | None:
    """Return the text of a content part; None for a part that vLLM skips."""
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else None
    field = _TEXT_FIELDS.get(kind) if isinstance(kind, str) else None
    check(field is not None, "content holds what is not text", NoTokensError)
    text: str | None = part.get(field)
    check(text is None or isinstance(text, str), "content holds a part without a text", NoTokensError)
    return text


def _without_billing(texts: Iterable[str]) -> Iterable[str]:
    for text in texts:
        if not text.startswith(_BILLING):
            yield text
        elif rest := text.partition("\n")[2]:
            yield rest


def _spoken(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tool calls and reasoning of an assistant's message."""
    calls, reasoning = message.get("tool_calls"), message.get("reasoning")
    check(not calls or isinstance(calls, list), "tool_calls must be a list", NoTokensError)
    spoken = {"tool_calls": [_call(call) for call in calls]} if calls else {}
    return spoken if reasoning is None else {**spoken, "reasoning": reasoning, "reasoning_content": reasoning}


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise NoTokensError("tool_calls must hold functions")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}


def _tool(tool: Any) -> dict[str, Any]:
    function: Any = tool.get("function") if isinstance(tool, dict) else None
    check(
        isinstance(function, dict) and isinstance(function.get("name"), str),
        "a tool must be an object with a function that has a name",
        NoTokensError,
    )
    late = tool.get("defer_loading")
    schema = {name: function.get(name) for name in ("name", "description", "parameters")}
    optional = {"strict": function.get("strict"), "defer_loading": function.get("defer_loading", late)}
    schema |= {name: value for name, value in optional.items() if value is not None}
    return {"type": "function", "function": schema} | ({} if late is None else {"defer_loading": late})


def _joined(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    check(value is None or isinstance(value, bool), f"{name} must be true or false", NoTokensError)
    return default if value is None else value
