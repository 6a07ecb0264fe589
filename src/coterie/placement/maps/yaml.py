"""YAML as placements have it: mappings by name or number, lists, whole numbers. All else that YAML can say is an error.

PyYAML parses; values are made here, from its events. Its loaders read `012` as ten and `1:30` as ninety, keep the last
of two equal keys, follow aliases, and the one in C overflows the stack where lists nest 200,000 deep.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from coterie.errors import TraceError
from coterie.placement.maps.files import text_of

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The parser in C where PyYAML was built with it."""
MAX_DEPTH = 3
"""Of collections inside each other: mapping, mapping, list. Reading stops there, however deep a file goes."""
_WHOLE = re.compile(r"0|[1-9][0-9]{0,17}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def yaml_of(path: Path) -> dict[str | int, Any]:
    """The file's one mapping, of mappings, lists and whole numbers. Raises TraceError with the line."""
    events = yaml.parse(text_of(path), Loader=LOADER)
    try:
        return _document(path, (event for event in events if not isinstance(event, yaml.StreamStartEvent)))
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        where = "YAML" if mark is None else f"line {mark.line + 1}"
        raise TraceError(path, where, f"cannot be parsed: {' '.join(problem.split())}") from None


def _document(path: Path, events: Iterator[Any]) -> dict[str | int, Any]:
    if not isinstance(next(events), yaml.DocumentStartEvent):
        raise TraceError(path, "YAML", "is empty")
    start = next(events)
    if not isinstance(start, yaml.MappingStartEvent):
        raise TraceError(path, _line(start), "must be a mapping")
    value: dict[str | int, Any] = _value(path, start, events, 1)
    next(events)  # the document's end
    if not isinstance(next(events), yaml.StreamEndEvent):
        raise TraceError(path, "YAML", "holds several documents")
    return value


def _value(path: Path, event: Any, events: Iterator[Any], depth: int) -> Any:
    if isinstance(event, yaml.AliasEvent) or event.anchor is not None or event.tag is not None:
        raise TraceError(path, _line(event), "has an alias, an anchor or a tag")
    if isinstance(event, yaml.ScalarEvent):
        if event.style or not _WHOLE.fullmatch(event.value):
            raise TraceError(path, _line(event), f"is {event.value[:20]!r}, expected a whole number, not negative")
        return int(event.value)
    if depth > MAX_DEPTH:
        raise TraceError(path, _line(event), f"is nested more than {MAX_DEPTH} deep")
    if isinstance(event, yaml.SequenceStartEvent):
        items = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(_value(path, event, events, depth + 1))
        return items
    found: dict[str | int, Any] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        key = _key(path, event)
        if key in found:
            raise TraceError(path, f"{_line(event)}: {key}", "is there twice")
        found[key] = _value(path, next(events), events, depth + 1)
    return found


def _key(path: Path, event: Any) -> str | int:
    if isinstance(event, yaml.ScalarEvent) and not (event.style or event.anchor or event.tag):
        if _WHOLE.fullmatch(event.value):
            return int(event.value)
        if _NAME.fullmatch(event.value):
            return str(event.value)
    raise TraceError(path, _line(event), "has a key that is neither a name nor a whole number")


def _line(event: Any) -> str:
    return f"line {event.start_mark.line + 1}"
