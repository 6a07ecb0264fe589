"""Registries: names, suggestions, and plugins found through entry points."""

from __future__ import annotations

import doctest
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import coterie.registry
from coterie.errors import ConfigError, UnknownNameError
from coterie.registry import PolicyRegistry, PolicyText, Registry, needs


def test_register_returns_the_thing() -> None:
    registry: Registry[type] = Registry("strategy")

    @registry.register("fcfs")
    class Fcfs:
        pass

    assert registry["fcfs"] is Fcfs
    assert "fcfs" in registry
    assert "lifo" not in registry


def test_a_name_is_given_once() -> None:
    registry: Registry[int] = Registry("strategy")
    registry.add("fcfs", 1)
    with pytest.raises(ConfigError, match=r"strategy 'fcfs' .* 1"):
        registry.add("fcfs", 2)
    assert registry["fcfs"] == 1


def test_unknown_name_suggests_the_nearest() -> None:
    registry: Registry[int] = Registry("planner")
    registry.add("eplb", 1)
    registry.add("static", 2)
    with pytest.raises(UnknownNameError) as error:
        registry["eplp"]
    assert str(error.value) == "Unknown planner 'eplp'. Did you mean 'eplb'? Known: eplb, static"


@given(st.dictionaries(st.text(max_size=5), st.integers()))
def test_is_a_sorted_view_of_what_was_added(items: dict[str, int]) -> None:
    registry: Registry[int] = Registry("thing")
    for name, item in items.items():
        registry.add(name, item)
    assert registry.names() == list(registry) == sorted(items)
    assert len(registry) == len(items)
    assert {name: registry[name] for name in registry} == items


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package as pip leaves one, with two planners and a thing that cannot be imported; its groups' prefix."""
    info = tmp_path / "coterie_test_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: coterie-test-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[coterie_test.planners]\nmine = coterie_test_plugin:PLANNER\neplb = coterie_test_plugin:OTHER\n"
        "[coterie_test.broken]\nbad = coterie_test_missing:NOTHING\n"
    )
    (tmp_path / "coterie_test_plugin.py").write_text("PLANNER = 'planner of the plugin'\nOTHER = 'not this one'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "coterie_test_plugin", raising=False)
    return "coterie_test"


def test_entry_points_are_found(plugin: str) -> None:
    registry: Registry[str] = Registry("planner", group=f"{plugin}.planners")
    registry.add("eplb", "built in")
    assert "coterie_test_plugin" not in sys.modules, "nothing is imported before a look-up"
    assert registry["mine"] == "planner of the plugin"
    assert registry.names() == ["eplb", "mine"]


def test_a_plugin_does_not_replace_a_built_in(plugin: str) -> None:
    registry: Registry[str] = Registry("planner", group=f"{plugin}.planners")
    registry.add("eplb", "built in")
    assert len(registry) == 2
    assert registry["eplb"] == "built in"


def test_a_known_name_imports_no_plugin(plugin: str) -> None:
    registry: Registry[str] = Registry("planner", group=f"{plugin}.broken")
    registry.add("eplb", "built in")
    assert registry["eplb"] == "built in"
    with pytest.warns(UserWarning, match=r"planner plugin .*coterie_test_missing"):
        assert registry.names() == ["eplb"], "one broken plugin does not take the built-ins with it"


def test_without_a_group_no_entry_point_is_read(plugin: str) -> None:
    assert plugin
    assert Registry[str]("planner").names() == []


def test_examples_of_the_docstrings_run() -> None:
    outcome = doctest.testmod(coterie.registry)
    assert outcome.attempted >= 9
    assert outcome.failed == 0


@dataclass(frozen=True)
class Settled:
    """A policy with a setting of every type that users write."""

    cost: object = needs("prices")
    share: float = 0.5
    most: int | None = 4
    exact: bool = False
    split: Literal["even", "free"] = "even"
    note: str = ""


def spelled() -> PolicyRegistry[Settled]:
    registry: PolicyRegistry[Settled] = PolicyRegistry("planner")
    registry.add("settled", Settled)
    return registry


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("settled", {}),
        ("settled:", {}),
        (" settled : share=1, most=7", {"share": 1.0, "most": 7}),
        ("settled:most=null,exact=true", {"most": None, "exact": True}),
        ("settled:most=None,note=None", {"most": None, "note": "None"}),
        ("settled:split=free,note=7", {"split": "free", "note": "7"}),
        ("settled:note=", {"note": ""}),
    ],
)
def test_settings_behind_a_name_have_the_types_of_the_policy(text: str, settings: dict[str, object]) -> None:
    registry = spelled()
    assert registry.make(text, {"cost": 1}) == Settled(cost=1, **settings)  # type: ignore[arg-type]
    registry.check(text)
    assert text in registry
    assert registry.parameters(text)["cost"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("settled:shar=1", ("shar", "'share'")),
        ("settled:share=much", ("share='much'", "float")),
        ("settled:most=1.5", ("most='1.5'", "int | None")),
        ("settled:split=odd", ("split='odd'", "'free'")),
        ("settled:share", ("'share'", "key=value")),
        ("settled:=1", ("'=1'", "key=value")),
        ("settled:share=1,share=2", ("'share=2'", "once")),
        (":share=1", (":share=1", "name")),
        ("", ("name",)),
    ],
)
def test_settings_that_are_refused(text: str, words: tuple[str, ...]) -> None:
    for ask in (spelled().check, lambda text: spelled().make(text, {"cost": 1})):
        with pytest.raises(ConfigError) as error:
            ask(text)
        for word in words:
            assert word in str(error.value)


def test_a_spelling_is_parsed_and_written() -> None:
    for text in ("joint", "joint:experts=0,kv=1.5"):
        assert str(PolicyText.parse(text)) == text


def test_modules_of_a_package_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy in a new file of the package is registered without a line in another file."""
    package = tmp_path / "discovered_policies"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from coterie.registry import Registry, import_modules\nthings = Registry('thing')\nimport_modules(__name__)\n"
    )
    (package / "new.py").write_text("from discovered_policies import things\nthings.add('new', 1)\n")
    (package / "_private.py").write_text("raise RuntimeError('is not imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    things = importlib.import_module("discovered_policies").things
    for name in [name for name in sys.modules if name.startswith("discovered_policies")]:
        monkeypatch.delitem(sys.modules, name)
    assert things["new"] == 1
