"""Tables fit: heads are broken between words, then the padding goes, then cells are broken between words."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from coterie.cli.output import WIDTH, out, print_table


@pytest.fixture(autouse=True)
def narrow() -> Iterator[None]:
    out.width = 40
    yield
    out.width = WIDTH


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_a_table_that_fits_is_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("T", ["a_name", "n"], [["x y", 1]])
    assert printed(capsys)[2] == "┃ a_name ┃ n ┃"


def test_heads_are_broken_first(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("T", ["router", "TPOT saved", "worst_excess_pct"], [["round_robin", "+8.0 [+6.8, +9.1]", 0.5]])
    assert printed(capsys)[1:] == [
        "┏━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━┳━━━━━━━━┓",
        "┃           ┃                 ┃   worst┃",
        "┃           ┃                 ┃  excess┃",
        "┃router     ┃TPOT saved       ┃     pct┃",
        "┡━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━╇━━━━━━━━┩",
        "│round_robin│+8.0 [+6.8, +9.1]│     0.5│",
        "└───────────┴─────────────────┴────────┘",
    ]


def test_words_are_whole_where_a_text_is_long(capsys: pytest.CaptureFixture[str]) -> None:
    text = "Zipf 0.7, from linear, enough 0.996, and so on until no line holds it"
    print_table("T", ["planner", "moves", "setting"], [["latency_optimal", 16123, text]])
    lines = printed(capsys)
    assert max(map(len, lines)) <= 40
    assert "│ latency_optimal │ 16,123 │ Zipf 0.7, │" in lines
    words = " ".join(line.split("│")[3].strip() for line in lines if line.startswith("│"))
    assert words == text


def test_a_word_too_long_for_the_terminal_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("T", ["a"], [["x" * 100]])
    assert max(map(len, printed(capsys))) <= 40


def test_an_empty_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("T", ["a", "b"], [], json.dumps({}))
    assert printed(capsys)[2] == "┃ a ┃ b ┃"
