"""Named things that a user can choose, and add to.

A policy, a reader or a suite registers itself under a name; looking up an unknown one suggests the nearest.
A package of the user's adds its own through an entry point of the registry's group, and it then works
everywhere a built-in does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from coterie.errors import ConfigError, UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """Name → thing, with entry points read on first look-up.

    >>> strategies: Registry[type] = Registry("strategy", group="coterie.strategies")
    >>> @strategies.register("fcfs")
    ... class Fcfs: ...
    >>> strategies["fcfs"] is Fcfs
    True
    """

    def __init__(self, kind: str, group: str | None = None) -> None:
        self.kind = kind
        self.group = group
        self._items: dict[str, T] = {}
        self._entry_points_read = group is None

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: make the thing known under this name. A name is given once."""

        def decorate(item: T) -> T:
            self.add(name, item)
            return item

        return decorate

    def add(self, name: str, item: T) -> None:
        if name in self._items:
            raise ConfigError(f"{self.kind} {name!r} is registered already, as {self._items[name]!r}")
        self._items[name] = item

    def _read_entry_points(self) -> None:
        if self._entry_points_read:
            return
        self._entry_points_read = True
        for point in entry_points(group=self.group or ""):
            if point.name in self._items:  # a built-in cannot be replaced by accident
                continue
            try:
                self._items[point.name] = point.load()
            except Exception as error:  # one broken plugin must not take the built-ins with it
                warnings.warn(f"{self.kind} plugin {point.name!r} cannot be loaded: {error}", stacklevel=3)

    def __getitem__(self, name: str) -> T:
        if name not in self._items:
            self._read_entry_points()
        try:
            return self._items[name]
        except KeyError:
            raise UnknownNameError(self.kind, name, self._items) from None

    def __contains__(self, name: object) -> bool:
        self._read_entry_points()
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())

    def names(self) -> list[str]:
        """All known names, sorted."""
        self._read_entry_points()
        return sorted(self._items)
