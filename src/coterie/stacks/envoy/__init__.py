"""An endpoint picker for Envoy: the Gateway API inference extension, and llm-d.

Envoy asks over gRPC where each request shall go (external processing, ext_proc), and passes the request and its answer
through. The picker chooses among the gateway's workers by the gateway's signals and routers. It needs hpack and
protobuf, which ``pip install 'coterie[envoy]'`` brings.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from coterie.errors import ConfigError

if TYPE_CHECKING:
    from coterie.stacks.envoy.picker import Picker

TESTED = {"hpack": ((4, 1), (4, 2)), "protobuf": ((6, 30), (7, 36))}
"""Package → oldest and newest version that the picker was tested with."""


def picker_class() -> type[Picker]:
    """Import the picker. Raises ConfigError if a package that it needs is missing or too old."""
    try:
        from coterie.stacks.envoy.picker import Picker
    except ImportError as error:
        raise ConfigError(
            f"the picker for Envoy needs hpack and protobuf: pip install 'coterie[envoy]' ({error})"
        ) from None
    return Picker


def untested() -> list[str]:
    """Return a sentence for each package in a version that the picker was not tested with."""
    problems = []
    for package, (oldest, newest) in TESTED.items():
        try:
            installed = version(package)
            numbers = tuple(int(part) for part in installed.split(".")[:2])
        except (PackageNotFoundError, ValueError):
            installed, numbers = "unknown", ()
        if not oldest <= numbers <= newest:
            between = " to ".join(f"{major}.{minor}" for major, minor in (oldest, newest))
            problems.append(f"picker: {package} {installed} was not tested; {between} were")
    return problems
