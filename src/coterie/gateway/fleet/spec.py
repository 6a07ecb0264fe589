"""Router specs, as in a config file or an administrator's request, and the routers and fleets made from them.

    router: locality_band:band=0.1     a registered router (built-in or plugin) and its own settings
    fit: fits/gpt-oss-20b.safetensors
    model: gpt-oss-20b                 model whose steps are priced on `device`; default: the fit's model
    device: h200

Files are read when a router is made, so a :class:`RouterSpec` is plain data that can be stored. Values that are not in
files (a fit in memory, custom prices, parameters of a plugin) go into a *context*, which overrides the files.

What a keeper passes to a router and gets back is checked. Token counts come from clients and workers, cached tokens
from event streams: the sizes of neither can be trusted. Compiled loops do not check their indices, so it is done here.
Footprints are checked on arrival (:func:`~coterie.wire.footprints.check_possible`), and routers refuse those of another
model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import index
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.costs.lines import DecodeStepPrices
from coterie.costs.presets import step_model
from coterie.costs.step import in_order
from coterie.errors import ConfigError, CoterieError, check, check_at_least, check_positive
from coterie.models import get_model
from coterie.placement.maps.formats import read_map
from coterie.registry import PolicyText
from coterie.routing import Decision, Fleet, JoinShortestQueue, Request, Router, RouterFit, routers
from coterie.routing.fleet import MOST_CONTEXT, shown
from coterie.types import INFINIBAND_400G, Placement, Topology, WeightDtype

COUNTS, SHARES = np.dtype(np.int64), np.dtype(np.float32)
"""Dtypes of the footprints that routers get: loops are compiled for these two."""


class BadRequestError(ConfigError):
    """A value of a request that must not reach a router, or an invalid decision; `reason` is its label in counters."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Fallback(NamedTuple):
    """Reason why a request was placed without the router."""

    reason: str
    """Short label for counters, from a fixed set."""
    text: str


def fallback_of(error: Exception) -> Fallback:
    """Return the fallback for an error. The text of foreign exceptions is omitted: it may quote the request."""
    if isinstance(error, BadRequestError):
        return Fallback(error.reason, str(error))
    text = f": {error}" if isinstance(error, CoterieError) else ""
    return Fallback("router_error", f"the router failed with {type(error).__name__}{text}")


def tokens_of(wanted: Request) -> int:
    """Return the number of prompt tokens; 0 if the value is not valid."""
    try:
        return _checked_tokens(wanted.prompt_tokens)
    except BadRequestError:
        return 0


class Checks:
    """Checker of requests. It remembers the last array of cached tokens that passed, which is often passed again."""

    def __init__(self) -> None:
        self._held: NDArray[Any] | None = None
        self._within = 0

    def checked(self, wanted: Request, fleet: Fleet) -> Request:
        """Return the request with the dtypes that loops are compiled for and one entry of cached tokens per row.

        Raises :class:`BadRequestError`. Cached tokens are clipped to the prompt's, because workers may report more. The
        same array is not checked twice in a row: callers must make a new array rather than change it.
        """
        _, tokens, footprint, domain, held, prefilled = wanted
        whole = type(prefilled) is bool
        if type(tokens) is not int or not 0 <= tokens <= MOST_CONTEXT:
            tokens, whole = _checked_tokens(tokens), False
        if footprint is not None:
            routed: NDArray[Any] = np.ascontiguousarray(footprint, SHARES if footprint.dtype.kind == "f" else COUNTS)
            whole = whole and routed is footprint
            footprint = routed
        rows = len(fleet.places)
        again = held is self._held and self._within <= tokens
        if held is not None and not (again and len(held) == rows):
            clipped = _checked_cached(held, rows, tokens)
            if clipped is held:
                self._held, self._within = clipped, tokens
            else:
                held, whole = clipped, False
        return wanted if whole else Request(wanted.id, tokens, footprint, domain, held, bool(prefilled))


def checked_row(decision: Decision, fleet: Fleet) -> int:
    """Return the row that a router chose; raise BadRequestError for a closed row or an invalid decision."""
    if not isinstance(decision, Decision):
        raise BadRequestError("bad_decision", f"the router gave a {type(decision).__name__}; expected a Decision")
    row, scores = decision.worker, decision.scores
    try:
        row = index(row)
    except TypeError:
        raise BadRequestError("bad_decision", f"the router chose a {type(row).__name__}; expected a row") from None
    if not 0 <= row < len(fleet.alive) or not fleet.alive.item(row):
        raise BadRequestError("bad_choice", f"the router chose row {shown(row)}, which may not be chosen")
    if type(scores) is not np.ndarray or scores.shape != fleet.alive.shape:
        raise BadRequestError("bad_decision", f"the router's scores must be an array of {len(fleet)}")
    return row


def _checked_tokens(tokens: Any) -> int:
    try:
        count = index(tokens)
    except TypeError:
        raise BadRequestError("bad_tokens", f"prompt_tokens is a {type(tokens).__name__}; expected an int") from None
    if not 0 <= count <= MOST_CONTEXT:
        raise BadRequestError("bad_tokens", f"prompt_tokens={shown(count)} must be in 0 … {MOST_CONTEXT}")
    return count


def _checked_cached(held: Any, rows: int, tokens: int) -> NDArray[np.int64]:
    if type(held) is np.ndarray and held.dtype is COUNTS and held.shape == (rows,) and held.flags.c_contiguous:
        if _within(held, tokens):
            return held
    elif type(held) is not np.ndarray or held.ndim != 1 or held.dtype.kind not in "iu":
        raise BadRequestError("bad_cached_tokens", "cached_tokens must be an array [row] of whole numbers")
    whole = np.zeros(rows, np.int64)
    some = min(rows, len(held))
    whole[:some] = np.minimum(np.maximum(held[:some], 0), tokens)
    return whole


@njit()
def _within(held: NDArray[np.int64], most: int) -> bool:
    wrong = 0
    for at in range(len(held)):
        wrong += not (0 <= held[at] <= most)
    return wrong == 0


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
    engine: str | None = None
    """Engine whose steps are priced; None for the first known of the model."""
    ranks: int = 1
    """Devices of a worker; several are an expert-parallel group with its experts in order."""
    kv_gb_s: float = 1e-9 * INFINIBAND_400G.bytes_per_s
    """Rate at which a worker gets the KV of a prompt that another one computed."""
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
        check_at_least(1, ranks=self.ranks)
        check_positive(kv_gb_s=self.kv_gb_s)


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
        check(
            rows <= placement.num_ranks, f"the placement has {placement.num_ranks} ranks; the pool has {rows} workers"
        )
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
    model = step_model(get_model(name), spec.device, spec.dtype, Topology(spec.ranks), engine=spec.engine)
    link = INFINIBAND_400G._replace(bytes_per_s=1e9 * spec.kv_gb_s)
    batch = {} if fitted is None else {"requests": fitted.batch}
    return DecodeStepPrices.of(model, **batch, placement=in_order(model), link=link)


def _refused(spec: RouterSpec, error: Exception) -> ConfigError:
    message = str(error) if isinstance(error, CoterieError | OSError) else f"{type(error).__name__}: {error}"
    return ConfigError(f"router {spec.router!r} cannot be made: {message}")
