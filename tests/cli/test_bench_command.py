"""``coterie bench`` lists the registered groups, a plugin's among them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from coterie.answers.suites import benches
from coterie.cli.main import app


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    def plugin(report: Any) -> list[dict[str, float | str]]:
        """A plugin's group."""
        report("plugin", 0, 1)
        return [{"name": "nothing", "median_us": 1.0}]

    monkeypatch.setattr(benches, "_items", {**benches._items, "zz-plugin": plugin})
    return benches.names()


def test_every_group_is_listed(groups: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench"])
    assert result.exit_code == 0, result.output
    assert [name for name in groups if name not in result.output] == []
    assert "A plugin's group." in result.output


def test_groups_as_json(groups: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", "--json"])
    listed = json.loads(result.output)["groups"]
    assert [row["group"] for row in listed] == groups
    assert all(row["measures"] for row in listed)


@pytest.mark.usefixtures("groups")
def test_one_group_runs() -> None:
    result = CliRunner().invoke(app, ["bench", "zz-plugin", "--json"])
    assert json.loads(result.output) == {"rows": [{"group": "zz-plugin", "name": "nothing", "median_us": 1.0}]}
