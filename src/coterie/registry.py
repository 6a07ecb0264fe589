"""Registries of named policies, readers and suites, which users can extend.

A policy, a reader or a suite registers itself under a name; looking up an unknown name suggests the nearest. A user's
package adds its own through an entry point of the registry's group, and it then works everywhere a built-in does.

Policies (strategies, routers, planners, predictors) are *made* from their names: :meth:`PolicyRegistry.make` reads a
policy's parameters, fills them from the caller's context, and names in one sentence what is missing. So no caller uses
a policy's class, and a plugin's policy is made like a built-in one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, fields, is_dataclass
from importlib.metadata import entry_points
from inspect import Parameter, signature
from typing import Any, Generic, TypeVar

from coterie.errors import ConfigError, UnknownNameError

T = TypeVar("T")

_HINT = "coterie.needs"


class Registry(Generic[T]):
    """Name → item; entry points are read on first look-up.

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
        """Decorator: register the item under this name. A name is used once."""

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
            except Exception as error:  # one broken plugin must not disable the built-ins
                warnings.warn(f"{self.kind} plugin {point.name!r} cannot be loaded: {error}", stacklevel=3)

    def check(self, name: str) -> None:
        """Raise for an unknown name, suggesting the nearest known one."""
        _ = self[name]

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


class Offers(Mapping[str, Any]):
    """A context whose values are computed only when a policy needs them, because some are expensive.

    >>> offers = Offers(seed=lambda: 3)
    >>> offers["seed"]
    3
    """

    def __init__(self, **makers: Callable[[], Any]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Any:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def needs(hint: str) -> Any:
    """Declare a policy's field without a default, and the hint for the error when it is missing."""
    return field(metadata={_HINT: hint})


class PolicyRegistry(Registry[Callable[..., T]]):
    """Name → policy class (or any callable that returns a policy), and the one way to make a policy.

    >>> from dataclasses import dataclass
    >>> routers: PolicyRegistry[object] = PolicyRegistry("router")
    >>> @routers.register("nearest")
    ... @dataclass(frozen=True)
    ... class Nearest:
    ...     fitted: str = needs("a fit to a trace")
    ...     band: float = 0.1
    >>> routers.make("nearest", {"fitted": "…", "seed": 3}, band=0.2)
    Nearest(fitted='…', band=0.2)
    >>> routers.make("nearest")
    Traceback (most recent call last):
    coterie.errors.ConfigError: router 'nearest' needs fitted: a fit to a trace
    """

    def make(self, name: str, context: Mapping[str, Any] | None = None, /, **settings: Any) -> T:
        """Make the policy of that name.

        `context` maps the names that policies use (`fitted`, `cost`, `objective`, `seed`, …) to the caller's values; a
        policy takes those it has a parameter for. `settings` are the user's own and override the context; a setting
        that the policy does not have is refused.
        """
        factory, taken, any_name = self[name], self.parameters(name), self._takes_any(name)
        unknown = [setting for setting in settings if setting not in taken]
        if unknown and not any_name:
            has = f"it has {', '.join(taken)}" if taken else "it has none"
            raise ConfigError(f"{self.kind} {name!r} has no setting {unknown[0]!r}; {has}")
        offered = {} if context is None else context
        given = {key: offered[key] for key in offered if key in taken and key not in settings} | settings
        for parameter, required in taken.items():
            if required and parameter not in given:
                raise ConfigError(f"{self.kind} {name!r} needs {parameter}{_hint(factory, parameter)}")
        return factory(**given)

    def parameters(self, name: str) -> dict[str, bool]:
        """Parameters of a policy: name → whether it is required."""
        return {
            parameter.name: parameter.default is Parameter.empty
            for parameter in signature(self[name]).parameters.values()
            if parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        }

    def _takes_any(self, name: str) -> bool:
        return any(one.kind is Parameter.VAR_KEYWORD for one in signature(self[name]).parameters.values())


def _hint(factory: Callable[..., Any], parameter: str) -> str:
    if is_dataclass(factory):
        for one in fields(factory):
            if one.name == parameter and _HINT in one.metadata:
                return f": {one.metadata[_HINT]}"
    return ""
