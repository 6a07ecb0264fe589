"""The shipped prompts: short requests in several domains and languages, for runs that need real text at hand."""

from __future__ import annotations

import csv
import io
from importlib.resources import files
from typing import NamedTuple


class Prompt(NamedTuple):
    """One request, and what it is about."""

    id: str
    domain: str
    lang: str
    """ISO 639-1."""
    prompt: str


def load_prompts() -> list[Prompt]:
    """All shipped prompts, in the file's order."""
    text = files("coterie").joinpath("data/prompts.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(io.StringIO(text, newline=""))
    return [Prompt(row["id"], row["domain"], row["lang"], row["prompt"]) for row in rows]
