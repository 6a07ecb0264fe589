"""Compiled functions are found by the content of their sources, not by the times of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie import _compiled_files
from coterie._compiled_files import sources_hash

COMPILED = "from coterie._numba import njit\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three files: `top` calls a compiled function of `middle`, which reads a constant of `bottom`."""
    monkeypatch.setattr(_compiled_files, "PACKAGE", tmp_path)
    (tmp_path / "top.py").write_text(COMPILED + "from coterie.middle import (\n    sums,\n)\n")
    (tmp_path / "middle.py").write_text(COMPILED + "from coterie.bottom import SIZE\n")
    (tmp_path / "bottom.py").write_text("SIZE = 1\nfrom coterie.words import NAME\n")
    (tmp_path / "words.py").write_text("NAME = 'a'\n")
    return tmp_path


def hash_of(package: Path) -> str:
    for remembered in (sources_hash, _compiled_files._imports, _compiled_files._text):
        remembered.cache_clear()
    return sources_hash(package / "top.py")


def test_times_do_not_matter(package: Path) -> None:
    before = hash_of(package)
    for file in package.iterdir():
        file.touch()
    assert hash_of(package) == before


@pytest.mark.parametrize("name", ["top", "middle", "bottom"])
def test_a_change_to_what_is_compiled_or_read_matters(package: Path, name: str) -> None:
    before = hash_of(package)
    with (package / f"{name}.py").open("a") as file:
        file.write("OTHER = 2\n")
    assert hash_of(package) != before


def test_a_change_beyond_the_constants_does_not(package: Path) -> None:
    before = hash_of(package)
    (package / "words.py").write_text("NAME = 'b'\n")
    assert hash_of(package) == before
