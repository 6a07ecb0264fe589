"""The first sentence of a guide says what the page is for, in words that need no decoding."""

from __future__ import annotations

import re

import pytest

from pages import PAGES, ROOT, guides

WORDS = 32
"""Most words of a first sentence."""
KNOWN = {"GPU", "GPUs", "HTTP", "TLS", "API", "FAQ", "SGLang", "NVIDIA", "DeepSeek", "OpenAI", "vLLM"}
"""Names and abbreviations that every reader of these pages knows; others are in the glossary."""


def first_sentence(text: str) -> str:
    """Of the first paragraph below the title that is not the page's limits."""
    for paragraph in re.split(r"\n{2,}", text.partition("\n")[2].strip()):
        if not paragraph.startswith(">"):
            return re.split(r"(?<=[.?!])\s", " ".join(paragraph.split()))[0]
    raise AssertionError("the page is empty")


@pytest.mark.parametrize("page", guides())
def test_it_is_a_short_sentence_in_plain_words(page: str) -> None:
    sentence = first_sentence(PAGES[page].read_text())
    assert re.fullmatch(r"[`A-Z].*[.?:]", sentence), sentence
    assert len(sentence.split()) <= WORDS, sentence
    code = re.findall(r"`([^`]*)`", sentence)
    assert all(one.startswith(("coterie ", "make ")) for one in code), sentence
    words = re.findall(r"[\w.]*[A-Z][\w.]*[A-Z]\w*", re.sub(r"`[^`]*`|\]\([^)]*\)", "", sentence))
    glossary = (ROOT / "docs/glossary.md").read_text()
    assert [word for word in words if word not in KNOWN and not re.search(rf"\b{re.escape(word)}\b", glossary)] == []
