"""Files that commands read and write.

Output paths are checked before the work begins, so that a command never replaces a file that Coterie did not write.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.errors import ConfigError, InputError, check, refuse

if TYPE_CHECKING:  # importing NumPy for --help would make it 50% slower
    from coterie.traces import ActivationTrace, LoadTable


def read_activations(
    path: Path, format: str | None = None, model: str | None = None, num_experts: int | None = None, named: str = ""
) -> ActivationTrace:
    """Read an activation trace in any known format and check its expert ids; raise for another kind of trace.

    `named` begins the error message: the option that gave the path.
    """
    from coterie.traces.readers import ReadOptions, read_trace

    return _activations(read_trace(path, format, ReadOptions(model=model, num_experts=num_experts)), f"{named}{path}")


def read_experts(
    path: Path, format: str | None, model: str | None, num_experts: int | None
) -> ActivationTrace | LoadTable:
    """Read an activation trace or a load table in any known format; raise for requests without experts."""
    from coterie.traces import LoadTable
    from coterie.traces.readers import ReadOptions, read_trace

    trace = read_trace(path, format, ReadOptions(model=model, num_experts=num_experts))
    return trace if isinstance(trace, LoadTable) else _activations(trace, str(path))


def _activations(trace: object, said: str) -> ActivationTrace:
    from coterie.traces import ActivationTrace

    if not isinstance(trace, ActivationTrace):
        raise ConfigError(f"{said} must be an activation trace; it holds a {type(trace).__name__}")
    trace.validate()  # a memory-mapped trace is unread so far; the error for a bad id must name the file
    return trace


def check_results(
    folder: Path | None, verb: str, starts: Mapping[str, bytes], inputs: Iterable[Path | None] = ()
) -> None:
    """Raise if results of a verb in a folder would replace other files; `starts`: name of a result → first bytes."""

    def read(path: Path) -> None:
        with path.open("rb") as stream:
            check(
                stream.read(200).startswith(starts[path.name]), f"{path} is not a result of coterie {verb}", InputError
            )

    if folder is not None and folder.exists():
        for name in starts:
            check_output(folder / name, "--out", f"a result of coterie {verb}", read, inputs)


def figure_results(verb: str, first_field: str) -> dict[str, bytes]:
    """Return the files of a verb that writes JSON and a figure, and how each begins."""
    return {f"{verb}.json": f'{{\n "{first_field}": '.encode(), f"{verb}.png": b"\x89PNG", f"{verb}.pdf": b"%PDF"}


def check_output(
    path: Path, option: str, kind: str, read: Callable[[Path], object], inputs: Iterable[Path | None] = ()
) -> None:
    """Raise if writing `path` would destroy something.

    An existing file may be replaced if `read` accepts it as a file of this `kind`. Links, devices and pipes are never
    written, nor is an input or a file inside an input's folder.
    """
    said, target = f"{option}={path}", _real(path)
    refuse(
        {
            f"{said} is a link; name the file itself": path.is_symlink(),
            f"{said} must be a file in a folder that exists": path.is_dir() or not path.absolute().parent.is_dir(),
            **{
                f"{said} is an input or lies in one ({given}); choose another place": target == _real(given)
                or (given.is_dir() and _real(given) in target.parents)
                for given in inputs
                if given is not None
            },
            f"{said} is a device or a pipe; name a file": path.exists() and not path.is_file(),
        }
    )
    if not path.exists():
        return
    try:
        read(path)
    except (InputError, OSError):
        raise ConfigError(f"{said} exists and is not {kind}; choose another name or remove it first") from None


def _real(path: Path) -> Path:
    """Resolve links, like ``Path.resolve`` but without an error for a loop of links."""
    return Path(os.path.realpath(path))


def trace_summary(path: Path, trace: ActivationTrace | LoadTable) -> dict[str, Any]:
    """Return the sizes of a trace that was written to the folder `path`."""
    from coterie.traces import LoadTable

    if isinstance(trace, LoadTable):
        return {"path": str(path), **load_sizes(trace)}
    table, meta = trace.requests, trace.meta
    return {
        "path": str(path),
        "model": meta.model,
        "requests": trace.num_requests,
        "tokens": trace.num_tokens,
        "prompt_tokens": int(table.prompt_tokens.sum()),
        "output_tokens": int(table.output_tokens.sum()),
        "layers": meta.num_layers,
        "experts": meta.num_experts,
        "top_k": meta.top_k,
        "bytes": sum(file.stat().st_size for file in path.iterdir()),
    }


def load_sizes(table: LoadTable) -> dict[str, Any]:
    return {
        "model": table.model,
        "windows": len(table),
        "layers": table.num_layers,
        "experts": table.num_experts,
        "activations": int(table.counts.sum()),
    }


def read_bearer(path: Path | None, variable: str) -> str | None:
    """Read a key from its file or the environment; never from the command line, which all users can see."""
    from coterie.net.access import read_key

    key = read_key(variable, path)
    check(
        key is None or (key and key.isascii() and key.isprintable() and " " not in key),
        f"{path or variable} must hold one key: printable ASCII characters without spaces",
    )
    return key
