"""Printed tables, diagrams and columns of pages fit a screen of 1280 pixels; other long lines wrap there."""

from __future__ import annotations

import re

import pytest

from coterie.cli.output import WIDTH
from pages import PAGES, ROOT

# Widths of the site's theme (furo) beside its navigation, and of a character of its monospaced fonts.
ARTICLE_EM, PADDING_EM, CODE_FONT, CHARACTER = 46, 0.875, 0.8125, 0.618
BLOCK = re.compile(r"^```\w*\n(.*?)^```$", re.M | re.S)
ALIGNED = re.compile(r"[\u2500-\u25ff]|\S {3,}\S")
"""What wrapping would break: drawn lines, and columns."""


def test_a_page_shows_as_many_characters_as_a_table_has() -> None:
    assert int((ARTICLE_EM - 2 * PADDING_EM) / (CODE_FONT * CHARACTER)) == WIDTH


@pytest.mark.parametrize("page", PAGES)
def test_what_cannot_wrap_is_narrow(page: str) -> None:
    lines = [line for block in BLOCK.findall(PAGES[page].read_text()) for line in block.splitlines()]
    assert [line for line in lines if len(line) > WIDTH and ALIGNED.search(line)] == []


def test_the_rest_wraps() -> None:
    assert "pre-wrap" in (ROOT / "docs/site/static/coterie.css").read_text()
