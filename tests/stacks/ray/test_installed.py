"""What is said where Ray is missing, has another request router, or is of a version that was not tested."""

from __future__ import annotations

import runpy
import sys
from types import ModuleType
from typing import Any

import pytest

from coterie.errors import UnavailableError
from coterie.stacks import ray as package

NAMES = {
    "ray": (),
    "ray.serve": (),
    "ray.serve.handle": ("DeploymentHandle",),
    "ray.serve.request_router": ("PendingRequest", "ReplicaID", "RequestRouter", "RunningReplica"),
    "ray.util": ("metrics",),
    "starlette": (),
    "starlette.requests": ("Request",),
    "starlette.responses": ("JSONResponse", "Response", "StreamingResponse"),
}
FOLLOWED = {"_choose_replica_for_request": None, "_add_pending_request_to_indices": None}


def installed(patch: pytest.MonkeyPatch, version: str, methods: dict[str, Any]) -> dict[str, Any]:
    """Import the names from a Ray of this version, whose request router has these methods."""
    for name, members in NAMES.items():
        module = ModuleType(name)
        for member in members:
            setattr(module, member, type(member, (), methods))
        patch.setitem(sys.modules, name, module)
    sys.modules["ray"].__version__ = version  # type: ignore[attr-defined]
    return runpy.run_path(f"{package.__path__[0]}/installed.py")


def test_a_missing_ray_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnavailableError, match=r"coterie\[ray\]"):
        runpy.run_path(f"{package.__path__[0]}/installed.py")


def test_another_request_router_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError, match=r"9\.9\.0"):
        installed(monkeypatch, "9.9.0", {})


def test_an_untested_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match=r"2\.61\.0"):
        installed(monkeypatch, "2.61.0", FOLLOWED)
    names = installed(monkeypatch, "2.60.3", FOLLOWED)
    assert names.keys() >= set(names["__all__"])
