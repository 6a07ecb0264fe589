"""The YAML of TensorRT-LLM's load balancer, and no other: three keys, whole numbers, lists in either style.

Nesting follows from what a key is (names are of the file, numbers of a layer), so indentation is not looked at. Strict:
what it does not know is an error with its line.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple, NoReturn

from coterie.errors import TraceError

_TOKEN = re.compile(r"(?P<name>[A-Za-z_]\w*)|(?P<number>\d+)|(?P<dash>-(?=\s))|(?P<mark>[\[\]{},:])")
_KEYS = ("num_slots", "initial_global_assignments", "layer_updates_per_iter")


class Assignments(NamedTuple):
    """What the file says."""

    num_slots: int
    layers: dict[int, list[int]]
    """Layer of the model → [slot] expert."""


class _Token(NamedTuple):
    kind: str | None
    text: str
    line: int


def parse_assignments(path: Path, text: str) -> Assignments:
    """Raise TraceError for anything but the three keys, each once."""
    return _Parser(path, _tokens(path, text)).file()


def _tokens(path: Path, text: str) -> list[_Token]:
    tokens = []
    for number, line in enumerate(text.splitlines(), 1):
        at, code = 0, line.split("#", 1)[0]
        while at < len(code):
            if code[at].isspace():
                at += 1
                continue
            match = _TOKEN.match(code, at)
            # A word or a number ends where no other begins: 12x is neither.
            if match is None or (match.end() < len(code) and (code[match.end() - 1] + code[match.end()]).isalnum()):
                raise TraceError(path, f"line {number}", f"{code[at : at + 20]!r} cannot be read")
            tokens.append(_Token(match.lastgroup, match.group(), number))
            at = match.end()
    return tokens


class _Parser:
    def __init__(self, path: Path, tokens: list[_Token]) -> None:
        self.path = path
        self.tokens = tokens
        self.at = 0

    def file(self) -> Assignments:
        numbers: dict[str, int] = {}
        layers: dict[int, list[int]] | None = None
        while self.at < len(self.tokens):
            key = self.take("name")
            if key.text not in _KEYS or key.text in numbers or (layers is not None and key.text == _KEYS[1]):
                problem = "is there twice" if key.text in _KEYS else f"is not a key; known: {', '.join(_KEYS)}"
                raise TraceError(self.path, f"line {key.line}: {key.text}", problem)
            self.take("mark", ":")
            if key.text == _KEYS[1]:
                layers = self.mapping()
            else:
                numbers[key.text] = int(self.take("number").text)
        for name in _KEYS:
            if name not in numbers and not (name == _KEYS[1] and layers):
                raise TraceError(self.path, name, "is missing: the file is cut, or no load balancer's")
        assert layers is not None
        return Assignments(numbers["num_slots"], layers)

    def mapping(self) -> dict[int, list[int]]:
        layers: dict[int, list[int]] = {}
        flow = self.next_is("{")
        while self.kind() == "number":
            key = self.take("number")
            self.take("mark", ":")
            if int(key.text) in layers:
                raise TraceError(self.path, f"line {key.line}: layer {key.text}", "is there twice")
            layers[int(key.text)] = self.list()
            if flow and not self.next_is(","):
                break
        if flow:
            self.take("mark", "}")
        return layers

    def list(self) -> list[int]:
        values: list[int] = []
        if self.next_is("["):
            while True:
                values.append(int(self.take("number").text))
                if not self.next_is(","):
                    break
            self.take("mark", "]")
            return values
        while self.kind() == "dash":
            self.take("dash")
            values.append(int(self.take("number").text))
        return values or self.fail("a list")

    def kind(self) -> str | None:
        return self.tokens[self.at].kind if self.at < len(self.tokens) else None

    def next_is(self, mark: str) -> bool:
        there = self.at < len(self.tokens) and self.tokens[self.at].text == mark
        self.at += there
        return there

    def take(self, kind: str, text: str | None = None) -> _Token:
        if self.kind() != kind or (text is not None and self.tokens[self.at].text != text):
            self.fail(text or f"a {kind}")
        self.at += 1
        return self.tokens[self.at - 1]

    def fail(self, expected: str) -> NoReturn:
        if self.at == len(self.tokens):
            raise TraceError(self.path, "end of file", f"expected {expected}: it is cut")
        found = self.tokens[self.at]
        raise TraceError(self.path, f"line {found.line}", f"found {found.text!r}, expected {expected}")
