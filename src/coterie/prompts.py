"""Prompts: shipped ones (short requests in several domains and languages), and those of a user's file."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from coterie.errors import TraceError, check_file, file_errors


class Prompt(NamedTuple):
    """One request, its domain and language."""

    id: str
    domain: str
    """Name of the domain; empty if unknown."""
    lang: str
    """ISO 639-1 code; empty if unknown."""
    prompt: str


def load_prompts() -> list[Prompt]:
    """Return all shipped prompts, in the file's order."""
    text = files("coterie").joinpath("data/prompts.csv").read_text(encoding="utf-8")
    return [Prompt(**row) for row in csv.DictReader(io.StringIO(text, newline=""))]


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a user's prompts: ``.txt`` with one per line, ``.jsonl`` objects, ``.csv`` with a header.

    The last two need ``prompt`` and may have ``id``, ``domain`` and ``lang``. Missing ids are made of file name
    and line number.
    """
    file = Path(path)
    readers = {".txt": _txt_rows, ".jsonl": _jsonl_rows, ".csv": _csv_rows}
    check_file(
        file.suffix.lower() in readers,
        file,
        "name",
        f"ends in {file.suffix!r}; prompts are read from {', '.join(readers)}",
    )
    with file_errors(file):
        text = file.read_text(encoding="utf-8")
    prompts = [_prompt(file, line, row) for line, row in readers[file.suffix.lower()](file, text)]
    check_file(prompts, file, "prompts", "there is none")
    for name, count in Counter(prompt.id for prompt in prompts).items():
        check_file(count <= 1, file, "id", f"{name!r} is given twice")
    return prompts


def take_in_turn(prompts: list[Prompt], count: int) -> list[Prompt]:
    """Return at most `count` prompts, chosen round-robin over the domains so that all are covered, in file order."""
    turns: Counter[str] = Counter()
    order = []
    for index, prompt in enumerate(prompts):
        turns[prompt.domain] += 1
        order.append((turns[prompt.domain], index))
    return [prompts[index] for index in sorted(index for _, index in sorted(order)[:count])]


def _txt_rows(_: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    return ((n, {"prompt": line.strip()}) for n, line in enumerate(text.split("\n"), start=1) if line.strip())


def _jsonl_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise TraceError(path, f"line {number}", f"is not JSON: {error}") from None
            check_file(isinstance(row, dict), path, f"line {number}", f"is {type(row).__name__}, expected an object")
            yield number, row


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise TraceError(path, f"line {reader.line_num}", str(error)) from None


def _prompt(path: Path, line: int, row: Mapping[str, Any]) -> Prompt:
    defaults = {"prompt": None, "id": f"{path.stem}-{line}", "domain": "", "lang": ""}
    values: dict[str, Any] = {
        name: default if row.get(name) is None else row[name] for name, default in defaults.items()
    }
    if isinstance(values["id"], int):
        values["id"] = str(values["id"])
    for name, value in values.items():
        if not isinstance(value, str) or (name in ("prompt", "id") and not value.strip()):
            raise TraceError(path, f"line {line}", f"{name}={value!r} must be a text that is not empty")
    return Prompt(**values)
