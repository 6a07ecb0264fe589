"""What is said where a package that the picker needs is missing, or of a version that was not tested."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError

import pytest

from coterie.errors import ConfigError
from coterie.stacks import envoy


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "coterie.stacks.envoy.picker", None)
    with pytest.raises(ConfigError, match=r"coterie\[envoy\]"):
        envoy.picker_class()


def test_an_untested_or_unknown_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {package: ".".join(map(str, newest)) for package, (_, newest) in envoy.TESTED.items()}
    monkeypatch.setattr(envoy, "version", lambda package: f"{versions[package]}.1")
    assert envoy.untested() == []
    versions = dict.fromkeys(versions, "99.1")
    assert [problem.split()[1:3] for problem in envoy.untested()] == [[package, "99.1.1"] for package in versions]

    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(envoy, "version", missing)
    assert all("unknown" in problem for problem in envoy.untested())
    assert len(envoy.untested()) == len(versions)
