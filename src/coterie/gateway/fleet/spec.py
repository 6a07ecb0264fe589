"""Router specs, as in a config file or an administrator's request, and the routers and fleets made from them.

    router: locality_band:band=0.1     a registered router (built-in or plugin) and its own settings
    fit: fits/gpt-oss-20b.safetensors
    model: gpt-oss-20b                 model whose steps are priced on `device`; default: the fit's model
    device: h200

Files are read when a router is made, so a :class:`RouterSpec` is plain data that can be stored. Values that are not in
files (a fit in memory, custom prices, parameters of a plugin) go into a *context*, which overrides the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from coterie.costs.lines import DecodeStepPrices
from coterie.costs.presets import step_model
from coterie.errors import ConfigError, CoterieError
from coterie.gateway.fleet.checks import Checks, checked_row, fallback_of
from coterie.models import get_model
from coterie.placement.maps.formats import read_map
from coterie.registry import PolicyText
from coterie.routing import Fleet, JoinShortestQueue, Request, Router, RouterFit, routers
from coterie.types import Placement, WeightDtype


class RouterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The router of a pool of workers, as plain data."""

    router: str = "join_shortest_queue"
    """Name of a registered router, followed by its own settings: ``locality_band:band=0.05``."""
    settings: dict[str, Any] = {}
    """Must be empty: settings are written after the router's name. Kept to give a helpful error."""
    fit: str | None = None
    """File of a saved fit (:meth:`RouterFit.save`)."""
    model: str | None = None
    """Model whose decode steps are priced; None for the fit's model."""
    device: str = "h200"
    """Preset of the device on which decode steps are priced."""
    dtype: WeightDtype | None = None
    """Weight dtype as deployed; None for the model's own."""
    placement: str | None = None
    """File of an expert placement whose ranks are the workers of the pool."""
    labels: dict[str, list[str]] = {}
    """Domain of requests → ids of the workers that serve it."""
    seed: int = 0
    """Seed for routers that choose at random."""

    def __post_init__(self) -> None:
        if self.settings:
            text = PolicyText(self.router, {key: str(value) for key, value in self.settings.items()})
            raise ConfigError(f"settings={self.settings} are written behind the router's name: router: {text}")


class PoolShape(NamedTuple):
    """The pool that a router is made for: the rows of its fleet, and the workers on them."""

    rows: int
    """Fewest rows that the fleet must have."""
    row_of: Mapping[str, int]
    """Worker id → row."""


class Made(NamedTuple):
    """A router and an empty fleet for it."""

    name: str
    router: Router
    fleet: Fleet
    fixed: bool = False
    """Whether the number of rows cannot change, because they are the ranks of a placement."""
    shape: tuple[int, ...] | None = None
    """Shape of a footprint, (layers, experts); None if unknown."""
    by_worker: bool = False
    """Whether the router must be made again when a worker joins, because it refers to workers by row."""


Maker = Callable[[PoolShape], Made]
"""Function that makes a router for a pool; called again when the pool grows."""


def maker(spec: RouterSpec, context: Mapping[str, Any] | None = None) -> Maker:
    """Read the files of a spec and return the maker of its router. Raises ConfigError if a file cannot be used."""
    given = dict(context or {})
    try:
        taken = routers.parameters(spec.router)
        if "fitted" not in given and spec.fit is not None:
            given["fitted"] = RouterFit.load(spec.fit)
        if "placement" not in given and spec.placement is not None and "placement" in taken:
            given["placement"] = read_map(spec.placement, model=spec.model).placement
        if "cost" not in given and "cost" in taken and (spec.model is not None or "fitted" in given):
            given["cost"] = prices_of(spec, given.get("fitted"))
    except (CoterieError, OSError) as error:
        raise _refused(spec, error) from error

    def make(pool: PoolShape) -> Made:
        try:
            return _made(spec, given, pool)
        except Exception as error:  # settings of a wrong type can raise anything
            raise _refused(spec, error) from error

    return make


def try_out(made: Made) -> None:
    """Route sample requests, with and without signals, on the empty fleet, to compile loops and find wrong settings.

    Raises ConfigError if the router raises or returns an invalid decision.
    """
    fleet, shape = made.fleet, made.shape
    requests = [Request("first"), Request("second", 100, cached_tokens=np.zeros(len(fleet), np.int64))]
    if shape is None and fleet.local is not None:
        shape = (fleet.local.shape[1], 64 * fleet.local.shape[2])
    if shape is not None:
        ones = np.ones(shape)
        requests += [Request("third", 100, ones.astype(np.int64)), Request("fourth", 100, ones.astype(np.float32))]
    try:
        for request in requests:
            checked_row(made.router.route(Checks().checked(request, fleet), fleet), fleet)
    except Exception as error:
        raise ConfigError(f"router {made.name!r} cannot be used: {fallback_of(error).text}") from error
    _compile_counting(fleet.tracks_experts)


def check_spec(spec: RouterSpec, context: Mapping[str, Any] | None = None, workers: int = 1) -> None:
    """Raise ConfigError if no router can be made from a spec. Compiles its loops, so that a later reload is fast."""
    try_out(maker(spec, context)(PoolShape(workers, {})))


def _compile_counting(experts: bool) -> None:
    """Admit a request to a small fleet and route another: the first live request must not wait for a compiler."""
    small = Fleet([1], np.zeros((1, 1), np.float32) if experts else None)
    small.admit("first", 0, 0, np.zeros(1, np.float32) if experts else None)
    JoinShortestQueue().route(Request("second"), small)
    small.finish("first")


def _made(spec: RouterSpec, given: Mapping[str, Any], pool: PoolShape) -> Made:
    taken = routers.parameters(spec.router)
    fitted, placement = given.get("fitted"), given.get("placement")
    rows = max(1, pool.rows)
    fixed = "placement" in taken and isinstance(placement, Placement)
    if fixed and isinstance(placement, Placement):
        if rows > placement.num_ranks:
            raise ConfigError(f"the placement has {placement.num_ranks} ranks; the pool has {rows} workers")
        rows = placement.num_ranks
    context = {"seed": spec.seed, **given}
    profiles = None
    shape: tuple[int, ...] | None = None
    if isinstance(placement, Placement):
        shape = (placement.num_layers, placement.num_experts)
    if isinstance(fitted, RouterFit):
        context["fitted"] = fitted = fitted.widened(rows)
        rows = rows if fixed else fitted.workers
        profiles, shape = fitted.profiles[:rows], fitted.learned.shape
    if spec.labels:
        context["labels"] = _rows_of(spec.labels, pool.row_of)
    router = routers.make(spec.router, context)
    return Made(
        spec.router,
        router,
        Fleet([1] * rows, profiles),
        fixed=fixed,
        shape=shape,
        by_worker=bool(spec.labels) and "labels" in taken,
    )


def _rows_of(labels: Mapping[str, list[str]], row_of: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Map each label to the rows of its workers in the pool; labels without such workers are dropped."""
    rows = {
        label: tuple(row_of[worker_id] for worker_id in ids if worker_id in row_of) for label, ids in labels.items()
    }
    return {label: own for label, own in rows.items() if own}


def prices_of(spec: RouterSpec, fitted: RouterFit | None) -> DecodeStepPrices:
    """Return decode-step prices of the spec's model, else of the fit's model. Raises CoterieError if unknown."""
    name = spec.model if spec.model is not None else fitted.model if fitted is not None else ""
    model = step_model(get_model(name), spec.device, spec.dtype)
    return DecodeStepPrices.of(model) if fitted is None else DecodeStepPrices.of(model, fitted.batch)


def _refused(spec: RouterSpec, error: Exception) -> ConfigError:
    message = str(error) if isinstance(error, CoterieError | OSError) else f"{type(error).__name__}: {error}"
    return ConfigError(f"router {spec.router!r} cannot be made: {message}")
