"""Prompts from a user's own file, in the three forms, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from coterie.errors import TraceError
from coterie.prompts import Prompt, load_prompts, read_prompts, take_in_turn


def test_txt_is_one_a_line(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("first\n\n  second, ünï\u2028code \r\nthird")
    assert read_prompts(tmp_path / "own.txt") == [
        Prompt("own-1", "", "", "first"),
        Prompt("own-3", "", "", "second, ünï\u2028code"),
        Prompt("own-4", "", "", "third"),
    ]


def test_jsonl(tmp_path: Path) -> None:
    rows = [{"prompt": "a\nb", "id": 7, "domain": "law"}, {"prompt": "c", "lang": "de", "other": [1]}]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert read_prompts(tmp_path / "own.jsonl") == [Prompt("7", "law", "", "a\nb"), Prompt("own-2", "", "de", "c")]


def test_csv_is_as_the_shipped_file(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text('id,domain,lang,prompt\nx-1,law,en,"two\nlines, one prompt"\n')
    assert read_prompts(tmp_path / "own.csv") == [Prompt("x-1", "law", "en", "two\nlines, one prompt")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "there is none"),
        ("a.txt", b"\xff\xfe", "is not UTF-8: invalid start byte at byte 0"),
        ("a.md", b"x", r"ends in '.md'; prompts are read from .txt, .jsonl, .csv"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt":', "line 2: is not JSON"),
        ("a.jsonl", b"[1]", "line 1: is list, expected an object"),
        ("a.jsonl", b'{"text": "x"}', "line 1: prompt=None must be a text that is not empty"),
        ("a.jsonl", b'{"prompt": 5}', "line 1: prompt=5 must be"),
        ("a.jsonl", b'{"prompt": "x", "domain": 5}', "line 1: domain=5 must be"),
        ("a.jsonl", b'{"prompt": "x", "id": "1"}\n{"prompt": "y", "id": 1}', "id: '1' is given twice"),
        ("a.csv", b"id,text\n1,x\n", "line 2: prompt=None"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=message):
        read_prompts(tmp_path / name)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="does not exist"):
        read_prompts(tmp_path / "none.txt")


def test_a_few_are_taken_from_all_domains() -> None:
    prompts = load_prompts()
    domains = {p.domain for p in prompts}
    few = take_in_turn(prompts, 2 * len(domains))
    assert Counter(p.domain for p in few) == dict.fromkeys(domains, 2)
    assert few == [p for p in prompts if p in few], "in the order they had"
    assert take_in_turn(prompts, 10**6) == prompts
