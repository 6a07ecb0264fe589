"""Every example runs, uses public names alone, and ends with a sentence; the list of them is whole."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

from command_line import without_compiling
from coterie.routing import routers

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_runs(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(routers, "_items", dict(routers._items))  # what it registers must not stay
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr()
    assert without_compiling(said.err) == ""
    last = said.out.splitlines()[-1]
    assert re.fullmatch(r"\S.* .*\.", last), last
    assert "nan" not in last
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_uses_public_names_alone(name: str) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            assert not [part for part in parts if part.startswith("_")]
        if isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_"), node.attr
    assert ast.get_docstring(tree)


def test_the_list_is_whole() -> None:
    listed = re.findall(r"^\| \[(\w+)\.py\]", (FOLDER / "README.md").read_text(), re.M)
    assert sorted(listed) == EXAMPLES
    assert len(listed) == 5
