"""Chat templates: a model's Jinja programs, rendered as transformers and vLLM render them.

A template is part of the model and runs in Jinja's sandbox, with the helper functions of transformers. A template in
a request is never run. Needs jinja2.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Literal

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from coterie.errors import ConfigError, check, check_given
from coterie.gateway.signals.messages import NoTokensError, developer_as_system, messages_of, template_settings

_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marker of the end of the last message, where the model continues; a template may strip its space."""
DEFAULT, TOOLS = "default", "tool_use"
"""Names of a model's templates, if it has several."""


class _Generation(Extension):
    """``{% generation %}``, which marks an assistant's text for training; here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Macro) -> str:
        said: str = caller()
        return said


class ChatTemplate:
    """Renders chat bodies. Thread-safe.

    `sources` are a model's templates by name. `special_tokens` are variables such as ``bos_token``. With `form` *auto*,
    a template that iterates over content parts gets a list of them; with *string* content is always one text.
    `separator` joins parts to a text: a line break in vLLM, a space in SGLang.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        form: Literal["auto", "string"] = "auto",
        separator: str = "\n",
    ) -> None:
        self._special, self._separator, self._form = dict(special_tokens or {}), separator, form
        self._templates = {name: _Template(name, source) for name, source in sources.items()}
        check(self._templates, "a chat template must be given")
        self.tells_time = any("strftime_now" in source for source in sources.values())
        """Whether the rendered text depends on the time."""

    def render(self, body: Mapping[str, Any]) -> str:
        """Return the text of a chat body; raise NoTokensError if it cannot be known."""
        settings = template_settings(body)
        template = self._chosen(settings.get("tools") is not None)
        messages = messages_of(body, wrapped=template.wraps and self._form == "auto", separator=self._separator)
        if not template.knows_developers:
            messages = developer_as_system(messages)
        continued = settings.pop("continue_final_message")
        check(
            not (continued and settings["add_generation_prompt"]),
            "continue_final_message and add_generation_prompt must not both be true",
            NoTokensError,
        )
        variables = {"tools": None, "documents": None, **self._special, **settings}
        try:
            if continued:
                return _continued(template, messages, variables)
            return template.compiled.render(messages=messages, **variables)
        except NoTokensError:
            raise
        except Exception as error:  # a template can raise anything; its errors concern these messages
            raise NoTokensError(f"the chat template refuses these messages: {error}"[:200]) from None

    def _chosen(self, with_tools: bool) -> _Template:
        template = (self._templates.get(TOOLS) if with_tools else None) or self._templates.get(DEFAULT)
        return check_given(template, f"none of the model's chat templates is named {DEFAULT!r}", NoTokensError)


class _Template:
    def __init__(self, name: str, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self.compiled = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"chat template {name!r} cannot be compiled: {error}") from None
        self.wraps = next(_loops_over_content(tree), None) is not None
        self.knows_developers = '"developer"' in source or "'developer'" in source
        self.reads_content = "content" in source


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Encode a value as JSON without escaping HTML, which Jinja's own `tojson` does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _continued(template: _Template, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    """Render the chat up to the end of its last message's text, so that the model continues that message."""
    messages = copy.deepcopy(messages)
    content = messages[-1].get("content")
    if isinstance(content, list):
        check(content, "continue_final_message: the last message has no text", NoTokensError)
        last: str = content[-1]["text"]
        content[-1]["text"] += _CONTINUE
    else:
        last = content or ""
        messages[-1]["content"] = last + _CONTINUE
    check(template.reads_content, "continue_final_message: the chat template reads no content", NoTokensError)
    text = template.compiled.render(messages=messages, **variables)
    check(
        last.strip() in text and _CONTINUE.strip() in text,
        "continue_final_message: the chat template changes the last message",
        NoTokensError,
    )
    at = text.rindex(_CONTINUE.strip())
    return text[:at] if text[at : at + len(_CONTINUE)] == _CONTINUE else text[:at].rstrip()


# Detection of templates that iterate over content parts, by variable names and with vLLM's rules: a loop over
# ``X.content`` where X is a loop variable of messages, over ``content`` outside of macros, or over a macro's parameter
# to which such content is passed.


def _loops_over_content(tree: nodes.Template) -> Iterator[nodes.For]:
    of_messages = _names_of(tree, "messages")
    messages = {
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, name) for name in of_messages)
    }
    inside: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        given = _parameters_with_content(tree, macro, messages)
        for loop in macro.find_all(nodes.For):
            inside.setdefault(id(loop), set()).update(given)
    for loop in tree.find_all(nodes.For):
        names = inside.get(id(loop), {"content"})
        if any(_reads(loop.iter, name, "content") for name in messages) or (
            isinstance(loop.iter, nodes.Name) and loop.iter.name in names
        ):
            yield loop


def _names_of(tree: nodes.Template, first: str) -> set[str]:
    """Return the variable's name, and the names of variables to which it or a slice of it is assigned."""
    names, waiting = {first}, [first]
    while waiting:
        name = waiting.pop()
        for assign in tree.find_all(nodes.Assign):
            target = assign.target
            if isinstance(target, nodes.Name) and target.name not in names and _reads(assign.node, name):
                names.add(target.name)
                waiting.append(target.name)
    return names


def _parameters_with_content(tree: nodes.Template, macro: nodes.Macro, messages: set[str]) -> set[str]:
    given = set()
    for call in tree.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        by_place = [(parameter.name, value) for parameter, value in zip(macro.args, call.args, strict=False)]
        by_name = [(keyword.key, keyword.value) for keyword in call.kwargs if isinstance(keyword, nodes.Keyword)]
        known = {parameter.name for parameter in macro.args}
        for parameter, value in by_place + by_name:
            if parameter in known and any(_reads(value, name, "content") for name in messages):
                given.add(parameter)
    return given


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether an expression is the variable, or its item `key`; filters, tests and slices are looked through."""
    if isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        return _reads(node.node, name, key)
    if key is not None:
        if isinstance(node, nodes.Getitem):
            right = isinstance(node.arg, nodes.Const) and node.arg.value == key
        elif isinstance(node, nodes.Getattr):
            right = node.attr == key
        else:
            return False
        return right and _reads_name(node.node, name)
    return _reads_name(node, name)


def _reads_name(node: nodes.Node | None, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
