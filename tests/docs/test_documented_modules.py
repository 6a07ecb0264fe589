"""The lab imports only modules that docs/architecture.md lists: the linter checks its package, these tests all."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAB = ROOT / "lab"


def documented() -> set[str]:
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("\n## Documented modules\n")[2].partition("\n## ")[0]
    rows = [(line, re.findall(r"`([\w.]+)`", line)) for line in section.splitlines() if line.startswith("| `")]
    names = set()
    for line, (package, *modules) in rows:
        names |= {f"{package}.{module}" for module in modules} | ({package} if " itself" in line else set())
    return names


def imported() -> Iterator[tuple[Path, str]]:
    """Modules of Coterie that files of the lab import; tests may look behind the doors."""
    for folder in ("src", "benchmarks", "training"):
        for path in sorted((LAB / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "coterie":
                    yield path, node.module
                elif isinstance(node, ast.Import):
                    yield from ((path, alias.name) for alias in node.names if alias.name.partition(".")[0] == "coterie")


def test_only_documented_modules_are_imported() -> None:
    names = documented()
    assert [(str(path.relative_to(LAB)), name) for path, name in imported() if name not in names] == []


def test_the_page_lists_what_is_imported_and_nothing_else() -> None:
    """So that the list says what a change of Coterie may break."""
    assert documented() == {name for _, name in imported()}


def test_the_linter_allows_what_is_documented() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    contract = next(one for one in contracts if one.get("source_modules") == ["coterie_lab"])
    assert contract["forbidden_modules"] == ["coterie"]
    allowed = {line.partition(" -> ")[2] for line in contract["ignore_imports"]}
    assert allowed <= documented()
