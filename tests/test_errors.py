"""The exception tree and its messages."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie import errors
from coterie.errors import ConfigError, CoterieError, InputError, TraceError, UnavailableError, UnknownNameError


def test_tree() -> None:
    assert issubclass(InputError, (CoterieError, ValueError))
    for kind in (TraceError, ConfigError, UnknownNameError):
        assert issubclass(kind, InputError)
    assert not issubclass(UnavailableError, InputError), "the input is sound, the machine lacks something"


def test_docstring_draws_every_class() -> None:
    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert classes == {name for name in classes if name in (errors.__doc__ or "")}
    assert len(classes) == 9


def test_trace_error_names_file_and_field() -> None:
    error = TraceError("run/meta.json", "kind", "found 'x', expected 'load'")
    assert str(error) == "run/meta.json: kind: found 'x', expected 'load'"
    assert (error.path, error.field, error.problem) == (Path("run/meta.json"), "kind", "found 'x', expected 'load'")


def test_unknown_name_suggests_and_lists() -> None:
    error = UnknownNameError("planner", "eplp", ["lplb", "eplb"])
    assert str(error) == "Unknown planner 'eplp'. Did you mean 'eplb'? Known: eplb, lplb"
    assert error.known == ["eplb", "lplb"]


def test_unknown_name_is_matched_whatever_its_case() -> None:
    assert "Did you mean 'eplb'?" in str(UnknownNameError("planner", "EPLB", ["eplb"]))


def test_unknown_name_without_a_near_one() -> None:
    assert str(UnknownNameError("planner", "zzz", ["eplb"])) == "Unknown planner 'zzz'. Known: eplb"


def test_unknown_name_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        raise UnknownNameError("planner", "x", [])


@given(st.text(max_size=20), st.lists(st.text(st.characters(codec="ascii", exclude_categories=["Cc"])), max_size=6))
def test_unknown_name_is_one_line_and_lists_all(name: str, known: list[str]) -> None:
    text = str(UnknownNameError("model", name, known))
    assert len(text.splitlines()) == 1
    assert repr(name) in text
    assert all(other in text for other in known)
