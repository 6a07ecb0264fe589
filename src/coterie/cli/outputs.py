"""Check output paths before the work begins, so that a command never replaces a file that Coterie did not write."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from coterie.errors import ConfigError, InputError


def check_output(
    path: Path, option: str, kind: str, read: Callable[[Path], object], inputs: Iterable[Path | None] = ()
) -> None:
    """Raise if writing `path` would destroy something.

    An existing file may be replaced if `read` accepts it as a file of this `kind`. Links, devices and pipes are never
    written, nor is an input or a file inside an input's folder.
    """
    said = f"{option}={path}"
    if path.is_symlink():
        raise ConfigError(f"{said} is a link; name the file itself")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"{said} must be a file in a folder that exists")
    target = _real(path)
    for given in inputs:
        if given is not None and (target == _real(given) or (given.is_dir() and _real(given) in target.parents)):
            raise ConfigError(f"{said} is an input or lies in one ({given}); choose another place")
    if not path.exists():
        return
    if not path.is_file():
        raise ConfigError(f"{said} is a device or a pipe; name a file")
    try:
        read(path)
    except (InputError, OSError):
        raise ConfigError(f"{said} exists and is not {kind}; choose another name or remove it first") from None


def _real(path: Path) -> Path:
    """Resolve links, like ``Path.resolve`` but without an error for a loop of links."""
    return Path(os.path.realpath(path))
