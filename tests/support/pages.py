"""The pages of the project, by their path without suffix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT).with_suffix("")): path
    for path in sorted(
        [
            *ROOT.glob("*.md"),
            *(ROOT / "docs").rglob("*.md"),
            *ROOT.glob("lab/benchmarks/*.md"),
            *ROOT.glob("examples/*.md"),
        ]
    )
}
GUIDES = ("Start here", "Guides", "Engines", "Serving stacks")
"""Sections of docs/README.md; reference pages and results are looked up, not followed."""
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def guides() -> list[str]:
    sections = re.split(r"^## (.+)$", (ROOT / "docs/README.md").read_text(), flags=re.M)
    texts = [text for heading, text in zip(sections[1::2], sections[2::2], strict=True) if heading in GUIDES]
    links = [link for text in texts for link in re.findall(r"^\| \[[^]]+\]\(([^)#]+)\.md\)", text, re.M)]
    return [f"docs/{link}" for link in links if not link.startswith("..")]


def blocks(*languages: str) -> Iterator[tuple[str, str]]:
    for page, path in PAGES.items():
        yield from ((page, text) for language, text in BLOCK.findall(path.read_text()) if language in languages)


def vllm_commands() -> list[tuple[str, str]]:
    """Commands that start vLLM, without the variables before them."""
    shown = []
    for page, block in blocks("", "bash", "sh"):
        text = block.replace("\\\n", " ")
        for start in (match.start() for match in re.finditer(r"^(?:\$ )?vllm serve ", text, re.M)):
            quoted, end = False, start
            while end < len(text) and (quoted or text[end] != "\n"):
                quoted ^= text[end] == "'"
                end += 1
            shown.append((page, text[start:end].removeprefix("$ ")))
    return shown
