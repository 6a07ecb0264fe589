"""Every guide ends with the next command and one sentence on it, in one form."""

from __future__ import annotations

import re

import pytest

from pages import PAGES, guides

NEXT = re.compile(r"\n\n## Next\n\n```\n(?P<command>\S.*)\n```\n\n(?P<sentence>[A-Z][^\n]*\.)\n\Z")
PROGRAMS = ("coterie ", "python ", "curl ")


@pytest.mark.parametrize("page", guides())
def test_a_guide_ends_with_the_next_command(page: str) -> None:
    found = NEXT.search(PAGES[page].read_text())
    assert found is not None
    assert found["command"].startswith(PROGRAMS)


def test_all_pages_for_users_are_guides() -> None:
    others = {"docs/README", "docs/commands", "docs/api", "docs/architecture", "docs/invariants"}
    users = {page for page in PAGES if page.startswith("docs/") and not page.startswith("docs/results/")}
    assert set(guides()) == users - others
