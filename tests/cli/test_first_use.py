"""The first minutes: help imports little, and a verb that compiles says so, on stderr, once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coterie.cli.verbs import VERBS

ROOT = Path(__file__).parents[2]
HEAVY = ("numba", "scipy", "matplotlib", "zmq", "aiohttp", "pyarrow")


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=env)


@pytest.fixture(scope="module")
def imported_by_help() -> dict[str, set[str]]:
    """Packages that the help of each verb imports beyond those of the verbs before it; the list of verbs is first."""
    done = python(f"""
import sys
from coterie.cli.main import main
for words in ([], *([verb] for verb in {list(VERBS)!r})):
    sys.argv = ["coterie", *words, "--help"]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code
    print("MODULES", *words, ":", *sys.modules, file=sys.stderr)
""")
    assert done.returncode == 0, done.stderr
    found: dict[str, set[str]] = {}
    for line in done.stderr.splitlines():
        verb, _, modules = line.removeprefix("MODULES ").partition(":")
        packages = {name.partition(".")[0] for name in modules.split()}
        found[verb.strip()] = packages.difference(*found.values())
    assert list(found) == ["", *VERBS]
    return found


def test_the_list_of_verbs_imports_neither_numpy_nor_a_verb(imported_by_help: dict[str, set[str]]) -> None:
    assert not imported_by_help[""] & {*HEAVY, "numpy"}


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_imports_nothing_heavy(verb: str, imported_by_help: dict[str, set[str]]) -> None:
    assert not imported_by_help[verb] & set(HEAVY)


def test_every_verb_has_a_file_and_a_line_in_the_list() -> None:
    folder = Path(__import__("coterie.cli.verbs").cli.verbs.__file__).parent
    assert {path.stem for path in folder.rglob("[a-z]*.py")} == set(VERBS)
    assert all((folder / verb.folder / f"{name}.py").exists() for name, verb in VERBS.items())
    assert [name for name, verb in VERBS.items() if not verb.summary.endswith(".")] == []


COMPILES = """
import sys
from coterie._compiling import announce
announce(7)
print("before", file=sys.stderr)
from coterie._numba import njit
print("after", file=sys.stderr)
@njit()
def double(number):
    return 2 * number
assert double(4) == 8 and double(4.0) == 8
"""


def test_a_verb_says_once_that_it_compiles_and_only_then(tmp_path: Path) -> None:
    file = tmp_path / "loop.py"  # numba caches what has a file
    file.write_text(COMPILES)
    command = [sys.executable, str(file)]
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    cold, warm = (subprocess.run(command, capture_output=True, text=True, timeout=300, env=env) for _ in range(2))
    message = "compiling once, about 7 s; coterie warm does it ahead"
    assert (cold.stdout, cold.stderr.splitlines()) == ("", ["before", "after", message])
    assert (warm.stdout, warm.stderr.splitlines()) == ("", ["before", "after"])


def test_a_loop_that_was_not_foreseen_is_told_when_it_compiles() -> None:
    done = python("""
from coterie._compiling import announce
announce(None)
from coterie._numba import numba
import sys
print("imported", file=sys.stderr)
for _ in range(2):
    numba.njit(lambda number: number + 1)(1)
""")
    assert done.stderr.splitlines() == ["imported", "compiling once, about 25 s; coterie warm does it ahead"]


def test_every_process_of_a_source_tree_finds_what_make_install_compiled(tmp_path: Path) -> None:
    code = """
import coterie._numba
from numba.core import config
print(config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES.partition(",")[0])
"""
    env = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA")}
    folders = []
    for chosen in ({}, {"NUMBA_CACHE_DIR": str(tmp_path)}):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**env, **chosen})
        folders.append(done.stdout.split())
    assert folders == [[str(ROOT / ".numba_cache"), "coterie._compiled_files.ByContent"], [str(tmp_path)]]


def test_a_program_that_imports_coterie_hears_nothing(tmp_path: Path) -> None:
    done = python(
        "from coterie._numba import numba; numba.njit(lambda number: number + 1)(1)", NUMBA_CACHE_DIR=str(tmp_path)
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.long
def test_after_warm_no_verb_compiles_anything(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    env = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "coterie", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done

    first = run("warm")
    assert "Compiled" in first.stdout
    assert json.loads(run("warm", "--json").stdout)["compiled"] == 0
    compiled = {path.name for path in cache.rglob("*.nbc")}
    for words in (
        ("generate", "trace", "--model", "gpt-oss-20b", "--requests", "200"),
        ("inspect", "trace"),
        ("fit", "trace", "--workers", "4", "-o", "router.safetensors"),
        ("simulate", "trace", "--requests", "60"),
        ("plan", "trace", "--ranks", "8"),
        ("evaluate", "all-to-all"),
        ("demo",),
        ("serve", "--embedded", "--demo", "--port", "0", "--json"),
    ):
        assert "compiling" not in run(*words).stderr, words
    assert {path.name for path in cache.rglob("*.nbc")} == compiled
