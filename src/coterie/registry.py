"""Registries of named policies, readers and suites, which users can extend.

A policy, a reader or a suite registers itself under a name; looking up an unknown name suggests the nearest. A user's
package adds items through entry points of the registry's group; they then work everywhere that built-in ones do.

Policies (strategies, routers, planners, predictors) are *made* from their names: :meth:`PolicyRegistry.make` reads a
policy's parameters, fills them from the caller's context, and names in one sentence what is missing. So no caller uses
a policy's class, and a plugin's policy is made like a built-in one. A policy with settings is spelled
``name:key=value,key=value`` on the command line, in config files and in Python alike.

Three ways to register: a module in the package of the built-in ones (:func:`import_modules` finds it), an entry point
of an installed package, or a file or module that :func:`load_plugin` imports (``--plugin`` on the command line).
"""

from __future__ import annotations

import difflib
import json
import os
import pkgutil
import sys
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, fields, is_dataclass
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from coterie.errors import ConfigError, UnknownNameError, check

T = TypeVar("T")

PLUGINS = "COTERIE_PLUGINS"
"""Environment variable: modules and files to import before a name is looked up, separated like PATH. Processes that
Coterie starts inherit it, so a plugin of the command line is known in all of them."""
_HINT = "coterie.needs"


def import_modules(package: str) -> None:
    """Import the modules of a package, which registers their items; private modules (``_name``) are left out."""
    for module in pkgutil.iter_modules(sys.modules[package].__path__):
        if not module.name.startswith("_"):
            import_module(f"{package}.{module.name}")


def load_plugin(name: str) -> None:
    """Import a module (``package.module``) or a file (``path/to/file.py``) that registers a user's policies.

    Its name is added to `COTERIE_PLUGINS` for the processes that this one starts. A plugin is imported once.
    """
    try:
        if name.endswith(".py"):
            name = str(Path(name).expanduser().resolve())
            _import_file(Path(name))
        else:
            import_module(name)
    except ConfigError:
        raise
    except Exception as error:
        hint = "; a file is named by its path, such as ./my_router.py" if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(f"plugin {name!r} cannot be imported: {type(error).__name__}: {error}{hint}") from error
    known = list(filter(None, os.environ.get(PLUGINS, "").split(os.pathsep)))
    if name not in known:
        os.environ[PLUGINS] = os.pathsep.join([*known, name])


def _import_file(path: Path) -> None:
    """Import a file under its own name, which pickle needs to find its classes in other processes."""
    imported = sys.modules.get(path.stem)
    if imported is not None:
        if getattr(imported, "__file__", None) == str(path):
            return
        raise ConfigError(f"plugin {str(path)!r} cannot be imported: a module {path.stem!r} is there already")
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for modules beside the file that it imports, and for processes of a pool
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise


class Registry(Mapping[str, T]):
    """Name → item; plugins of the environment and entry points are read on first look-up.

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
        self._plugins_read = group is None

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers an item under this name; each name may be used once."""

        def decorate(item: T) -> T:
            self.add(name, item)
            return item

        return decorate

    def add(self, name: str, item: T) -> None:
        if name in self._items:
            raise ConfigError(f"{self.kind} {name!r} is registered already, as {self._items[name]!r}")
        self._items[name] = item

    def _read_plugins(self) -> None:
        if self._plugins_read:
            return
        self._plugins_read = True
        for plugin in filter(None, os.environ.get(PLUGINS, "").split(os.pathsep)):
            load_plugin(plugin)
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
            self._read_plugins()
        try:
            return self._items[name]
        except KeyError:
            raise UnknownNameError(self.kind, name, self._items) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())

    def names(self) -> list[str]:
        """Return all known names, sorted."""
        self._read_plugins()
        return sorted(self._items)


class Offers(UserDict[str, Any]):
    """A context whose values are computed only when a policy needs them, because some are expensive.

    >>> offers = Offers(seed=lambda: 3)
    >>> offers["seed"]
    3
    """

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()


def needs(hint: str) -> Any:
    """Declare a policy's field without a default; `hint` is part of the error if it is missing."""
    return field(metadata={_HINT: hint})


class PolicyText(NamedTuple):
    """A policy as users write it: ``name``, or ``name:key=value,key=value``.

    >>> PolicyText.parse("joint:experts=0,kv=0.5")
    PolicyText(name='joint', settings={'experts': '0', 'kv': '0.5'})
    """

    name: str
    settings: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> PolicyText:
        name, _, rest = text.partition(":")
        settings: dict[str, str] = {}
        for part in filter(None, rest.split(",")):
            key, equals, value = part.partition("=")
            check(
                equals and key.strip() and key.strip() not in settings,
                f"{text!r} must be NAME or NAME:key=value,key=value with every key once ({part!r})",
            )
            settings[key.strip()] = value.strip()
        check(name.strip(), f"{text!r} has no name: it must be NAME or NAME:key=value,key=value")
        return cls(name.strip(), settings)

    def __str__(self) -> str:
        settings = ",".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.name}:{settings}" if settings else self.name


class PolicyRegistry(Registry[Callable[..., T]]):
    """Name → policy class (or any callable that returns a policy), and the one way to make a policy.

    Wherever a policy is named, settings may follow its name: ``name:key=value,key=value``.

    >>> from dataclasses import dataclass
    >>> routers: PolicyRegistry[object] = PolicyRegistry("router")
    >>> @routers.register("nearest")
    ... @dataclass(frozen=True)
    ... class Nearest:
    ...     fitted: str = needs("a fit to a trace")
    ...     band: float = 0.1
    >>> routers.make("nearest:band=0.2", {"fitted": "…", "seed": 3})
    Nearest(fitted='…', band=0.2)
    >>> routers.make("nearest")
    Traceback (most recent call last):
    coterie.errors.ConfigError: router 'nearest' needs fitted: a fit to a trace
    """

    def __getitem__(self, text: str) -> Callable[..., T]:
        return super().__getitem__(text.partition(":")[0].strip())

    def check(self, name: str) -> None:
        """Raise for an unknown name or setting, or a value of a wrong type."""
        self._settings(name)

    def make(self, name: str, context: Mapping[str, Any] | None = None, /, **settings: Any) -> T:
        """Make the policy of that name, which may carry settings: ``name:key=value``.

        `context` maps the names that policies use (`fitted`, `cost`, `objective`, `seed`, …) to the caller's values; a
        policy takes those it has a parameter for. Settings, in the name or as arguments, are the user's own and
        override the context; a setting that the policy does not have is refused.
        """
        own = self._settings(name, settings) | settings
        factory, required, offered = self[name], self.parameters(name), context or {}
        given = {key: offered[key] for key in offered if key in required and key not in own} | own
        for parameter, is_required in required.items():
            if is_required and parameter not in given:
                needed = f"{parameter}{_hint(factory, parameter)}"
                raise ConfigError(f"{self.kind} {PolicyText.parse(name).name!r} needs {needed}")
        return factory(**given)

    def parameters(self, name: str) -> dict[str, bool]:
        """Return the parameters of a policy: name → whether it is required."""
        return {
            parameter.name: parameter.default is Parameter.empty
            for parameter in signature(self[name]).parameters.values()
            if parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        }

    def _settings(self, text: str, more: Mapping[str, Any] = {}) -> dict[str, Any]:
        """Return the settings after a name, converted to the parameters' types; keys of `more` are checked too."""
        policy = PolicyText.parse(text)
        factory = self[policy.name]
        try:
            parameters = signature(factory, eval_str=True).parameters
        except Exception:  # an annotation may name a type that is not imported: values are then read as JSON
            parameters = signature(factory).parameters
        if not any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values()):
            for key in (*policy.settings, *more):
                if key not in parameters:
                    raise ConfigError(f"{self.kind} {policy.name!r} has no setting {key!r}; {_known(key, parameters)}")
        settings = {}
        for key, value in policy.settings.items():
            kind = parameters[key].annotation if key in parameters else Parameter.empty
            try:
                settings[key] = _converted(value, kind)
            except ValueError:
                words = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
                raise ConfigError(f"{self.kind} {policy.name!r}: {key}={value!r} must be {words}") from None
        return settings


def _known(key: str, parameters: Mapping[str, Parameter]) -> str:
    nearest = difflib.get_close_matches(key, parameters, n=1, cutoff=0.5)
    return (f"did you mean {nearest[0]!r}? " if nearest else "") + f"it has {', '.join(parameters) or 'none'}"


def _converted(text: str, kind: Any) -> Any:
    """Convert a setting to the type of its parameter; if unknown, read JSON or else text. Raises ValueError."""
    import msgspec

    if kind is not Parameter.empty and not isinstance(kind, str):
        for spelling in (text, "null") if text == "None" else (text,):
            try:
                return msgspec.convert(spelling, kind, strict=False)
            except msgspec.ValidationError:
                continue
            except TypeError:  # a type that msgspec does not know
                return text
        raise ValueError(text)
    try:
        return json.loads(text)
    except ValueError:
        return text


def _hint(factory: Callable[..., Any], parameter: str) -> str:
    hints = {own.name: own.metadata.get(_HINT) for own in fields(factory)} if is_dataclass(factory) else {}
    return f": {hints[parameter]}" if hints.get(parameter) else ""
