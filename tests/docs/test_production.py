"""The page on upgrades says the versions that the formats have."""

from __future__ import annotations

import re
from importlib import import_module

import pytest

from pages import PAGES

MODULES = (
    "traces.requests",
    "routing.fitted",
    "predictors.token_table.rows",
    "dispatch.tables",
    "placement.maps.formats",
    "placement.scenarios",
    "costs.presets",
    "gateway.saved",
    "wire.footprints",
    "engines.worker.transfer",
)
"""In the order of the page's table."""


def versions() -> list[str]:
    section = PAGES["docs/gateway/production"].read_text().partition("## What an upgrade keeps")[2]
    return re.findall(r"^\| [^|]+ \| [^|]+ \| (\d+) \|", section, re.M)


def test_the_page_has_every_format() -> None:
    assert len(versions()) == len(MODULES)


@pytest.mark.parametrize(("module", "version"), list(zip(MODULES, versions(), strict=True)))
def test_versions_are_those_of_the_formats(module: str, version: str) -> None:
    pytest.importorskip("safetensors")
    assert str(import_module(f"coterie.{module}").VERSION) == version
