"""Results of cells, kept in a file as they complete, so that an interrupted run continues where it stopped."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

C = TypeVar("C", bound=Hashable)
R = TypeVar("R")


@dataclass(frozen=True)
class KeptResults(Generic[R]):
    """A file of JSON lines, one for each result, found again by its cell and by what else it depends on."""

    path: Path
    kind: type[R]
    """Type of a result, such as a NamedTuple or a dict[str, float]: it must be the same after a turn through JSON."""
    version: str
    """What a result depends on besides its cell, such as the number of requests and a digest of the sources. Lines of
    another version stay in the file and are not read."""

    def read(self, cells: Iterable[C]) -> dict[C, R]:
        """Return the results that are in the file. A line that was cut, or holds no result of this kind, is none."""
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        found: dict[str, R] = {}
        for line in lines:
            try:
                cell, version, value = json.loads(line)
                if version == self.version:
                    found[cell] = self._made(value)
            except (ValueError, TypeError, msgspec.ValidationError):
                continue
        return {cell: found[repr(cell)] for cell in cells if repr(cell) in found}

    def add(self, cell: Hashable, result: R) -> R:
        """Append one line; return the result as `read` will, so that a resumed run has the values of a whole one."""
        line = json.dumps([repr(cell), self.version, msgspec.to_builtins(result, str_keys=True)])
        with self.path.open("a") as file:
            file.write(f"\n{line}")  # the break comes first, since the last line may have been cut
        return self._made(json.loads(line)[2])

    def _made(self, value: Any) -> R:
        return msgspec.convert(value, self.kind, str_keys=True)
