"""Every guide ends with the next command and one sentence on it, in one form."""

from __future__ import annotations

import re

import pytest

from pages import PAGES, ROOT

GUIDES = ("Start here", "Guides", "Engines")
"""Sections of docs/README.md; reference pages and results are looked up, not followed."""
NEXT = re.compile(r"\n\n## Next\n\n```\n(?P<command>\S.*)\n```\n\n(?P<sentence>[A-Z][^\n]*\.)\n\Z")
PROGRAMS = ("coterie ", "python ", "curl ")


def guides() -> list[str]:
    sections = re.split(r"^## (.+)$", (ROOT / "docs/README.md").read_text(), flags=re.M)
    texts = [text for heading, text in zip(sections[1::2], sections[2::2], strict=True) if heading in GUIDES]
    links = [link for text in texts for link in re.findall(r"^\| \[[^]]+\]\(([^)#]+)\.md\)", text, re.M)]
    return [f"docs/{link}" for link in links if not link.startswith("..")]


@pytest.mark.parametrize("page", guides())
def test_a_guide_ends_with_the_next_command(page: str) -> None:
    found = NEXT.search(PAGES[page].read_text())
    assert found is not None
    assert found["command"].startswith(PROGRAMS)


def test_all_pages_for_users_are_guides() -> None:
    others = {"docs/README", "docs/commands", "docs/api", "docs/architecture", "docs/invariants"}
    users = {page for page in PAGES if page.startswith("docs/") and not page.startswith("docs/results/")}
    assert set(guides()) == users - others
