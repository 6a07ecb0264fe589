"""Drive one set-up of the control loop: feed it events, run fits in a thread, send messages to the gateway.

Holds no socket. Time is passed in, in seconds of a monotonic clock; times in messages to the gateway are in seconds
since the epoch.

Placement advice is for one configured expert-parallel group, under the load of the whole fleet: each worker of a fleet
holds all experts, or is such a group itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.control import AdviceSettings, ControlEvent, ControlLoop, FitJob, LoadSeen, LoopShape, PlacementAdvisor
from coterie.control.advice import ENGINE
from coterie.control.base import RequestSeen
from coterie.control.traffic import Traffic
from coterie.costs.presets import step_model
from coterie.errors import CoterieError, check_given
from coterie.gateway.config import AdviseSection
from coterie.gateway.control.matching import Matcher, SentRequests
from coterie.gateway.control.messages import (
    MOST_KEPT_BYTES,
    ControlView,
    FromLoop,
    HeatMap,
    KeptRequests,
    SetUp,
    Swapped,
    Told,
    UseFit,
)
from coterie.gateway.control.streams import ExpertStreams, message_bytes
from coterie.gateway.fleet.spec import PoolShape, RouterSpec, maker, prices_of
from coterie.models import get_model
from coterie.placement import Objective, read_map
from coterie.placement.maps.targets import Target
from coterie.routing import Router, RouterFit
from coterie.types import Placement, Topology
from coterie.wire.expert_events import ExpertLoad, RequestExperts

KEPT_FITS = 3
"""Number of fit files that are kept: the fit in force, the one before, and one being swapped in."""
FIT_NICE = 19
"""Niceness of the fitting thread: the lowest priority, so that fits do not delay requests."""
VIEW_S = 1.0
"""Shortest time between two views sent to the gateway, in seconds."""
PIECES = 30
"""Number of last reports of a worker that are summed: half a minute at one report per second."""
MOST_WORKERS = 256
"""Most workers whose loads are kept; those of further workers are dropped."""
MOST_CELLS = 1 << 15
"""Most values in a heat map: enough for 61 layers of 512 experts."""
MOST_TOKENS = 1 << 53
"""Largest count that is sent: JavaScript's integers are exact up to 2^53."""


class Driver:
    """Driver of one control loop for one router. Not thread-safe."""

    def __init__(
        self, asked: SetUp, send: Callable[[FromLoop], None], now_s: float, sent: SentRequests | None = None
    ) -> None:
        """`sent` are the requests whose events count; None for all. Raises CoterieError if the loop cannot be made."""
        self.generation = asked.generation
        self._send, self._spec, self._section, self._rows = send, asked.spec, asked.section, asked.rows
        self._folder = Path(asked.folder)
        self._epoch_s = time.time() - now_s
        self._no_advice: str | None = None
        self._spare_kv_tokens = 0.0
        nothing = f"router {asked.spec.router!r} uses no fit: nothing is learned, expert maps are followed"
        fit = RouterFit.load(check_given(asked.spec.fit, nothing))
        shape = LoopShape(fit.model, fit.num_layers, fit.num_experts, fit.learned.top_k, asked.rows)
        self.loop = ControlLoop(
            shape,
            fit,
            self._router,
            asked.section.settings(),
            batch=fit.batch,
            prices=prices_of(asked.spec, fit) if asked.section.score == "time" else None,
            advisor=self._advisor(shape),
            now_s=now_s,
        )
        self._refused = 0
        """Number of the advice whose plan could not be written."""
        self._bind(asked)
        self.matcher = Matcher(shape, sent)
        self.most_bytes = message_bytes(shape)
        """Most bytes of a message in a worker's stream."""
        self.loads = RecentLoads()
        self._fits = 0
        self._files: list[Path] = []
        self._fitted: SimpleQueue[tuple[RouterFit, float] | str] = SimpleQueue()
        self._fit_s: float | None = None
        self._counted: Counter[str] = Counter()
        self._events: list[ControlEvent] = []
        self._next_view_s = now_s

    def take(self, worker: str, event: RequestExperts | ExpertLoad, now_s: float) -> None:
        """Handle an event of a worker's stream; invalid ones are counted and dropped."""
        seen = self.matcher.take(worker, event, now_s)
        if seen is None:
            return
        self.loop.observe(seen)
        if isinstance(seen, LoadSeen):
            self.loads.add(seen)

    def answer(self, message: Swapped, now_s: float) -> None:
        """Handle the gateway's reply to a :class:`UseFit`; replies to earlier ones are ignored."""
        if message.fit == self._fits:
            if message.problem is None:
                self.loop.swapped(now_s)
            else:
                self.loop.swap_failed(now_s, message.problem)

    def resize(self, fleet: SetUp) -> None:
        """Adapt the loop to workers that joined or left."""
        self.loads.keep({entry.worker for entry in fleet.streams})
        self._bind(fleet)
        if fleet.rows != self._rows:
            self._rows = fleet.rows
            self.loop.resize(fleet.rows)

    def tick(self, now_s: float, streams: ExpertStreams) -> None:
        """Run one tick of the loop and send the gateway its decisions, with the counters of the streams."""
        with contextlib.suppress(Empty):
            result = self._fitted.get_nowait()
            if isinstance(result, str):
                self.loop.fit_failed(result)
            else:
                self.loop.candidate(*result)
                self._fit_s = result[1]
        self.matcher.expire(now_s)
        tick = self.loop.tick(now_s)
        self._events += [*tick.events, *self._write_plan(now_s)]
        if tick.job is not None:
            threading.Thread(target=self._fit, args=(tick.job,), name="coterie-fit", daemon=True).start()
        if tick.use is not None:
            self._use(tick.use, now_s)
        self._tell(now_s, streams)

    def _write_plan(self, now_s: float) -> list[ControlEvent]:
        """Write the advised plan to the placement map, if the config has `apply`.

        A plan is written only after it has been evaluated on a window of loads that it was not made from.
        """
        advice, section = self.loop.advice, self._section
        if not section.apply or section.map is None or advice is None or advice.plan is None:
            return []
        # Pending: written already; its workers load it.
        if advice.id == self._refused or advice.gain_next_pct is None or advice.state == "pending":
            return []
        path = Path(section.map)
        try:
            advice.write(path)
        except (CoterieError, OSError) as error:
            self._refused = advice.id
            return [ControlEvent(now_s, "plan_kept", f"plan {advice.id} cannot be written to {path}: {error}")]
        self.loop.written(advice.id, str(path), section.confirm_s)
        return []

    def _bind(self, fleet: SetUp) -> None:
        rows = {entry.worker: entry.row for entry in fleet.streams if entry.row is not None}
        self.loop.bind({entry.worker: entry.rank for entry in fleet.streams}, rows)

    def _advisor(self, shape: LoopShape) -> PlacementAdvisor | None:
        """Make the placement advisor; return None and store the reason if that fails: fits do not need it."""
        if self._section.advise is not None:
            try:
                advisor, self._spare_kv_tokens = advisor_of(self._section.advise, shape, self._spec)
                advisor.warm_up()
                return advisor
            except CoterieError as error:
                self._no_advice = str(error)
        return None

    # ----------------------------------------------------------------------------------------------------------- fits

    def _router(self, fit: RouterFit) -> Router:
        """Make the pool's router from a given fit."""
        return maker(msgspec.structs.replace(self._spec, fit=None), {"fitted": fit})(PoolShape(self._rows, {})).router

    def _fit(self, job: FitJob) -> None:
        """Run a fit job, in a thread of the lowest priority, and queue its result or error."""
        with contextlib.suppress(OSError, AttributeError):  # only Linux has priorities per thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), FIT_NICE)
        started = time.perf_counter()
        try:
            fitted = job.run()
        except Exception as error:  # whatever a fit raises, the loop continues with the fit in force
            self._fitted.put(f"{type(error).__name__}: {error}")
        else:
            self._fitted.put((fitted, time.perf_counter() - started))

    def _use(self, fit: RouterFit, now_s: float) -> None:
        self._fits += 1
        file = self._folder / f"fit-{self.generation}-{self._fits}.safetensors"
        try:
            fit.save(file)
        except (OSError, CoterieError) as error:
            self.loop.swap_failed(now_s, f"{file} cannot be written: {error}")
            return
        self._files.append(file)
        for old in self._files[:-KEPT_FITS]:
            old.unlink(missing_ok=True)
        del self._files[:-KEPT_FITS]
        self._send(UseFit(self.generation, self._fits, str(file)))

    # -------------------------------------------------------------------------------------------------------- telling

    def _tell(self, now_s: float, streams: ExpertStreams) -> None:
        inside = sum(count for name, count in self.loop.counters.items() if name.startswith("ignored_"))
        counted = Counter(
            {f"streams.{kind}": count for kind, count in streams.counters.items()}
            | {f"ignored.{reason}": count for reason, count in self.matcher.counters.items()}
            | {"ignored.loop": inside}
        )
        news, self._counted = counted - self._counted, counted
        view = b""
        if now_s >= self._next_view_s:
            self._next_view_s = now_s + VIEW_S
            view = msgspec.msgpack.encode(self._view(streams), enc_hook=_plain)
        events, self._events = [self._event(event) for event in self._events], []
        self._send(Told(generation=self.generation, events=events, counters=dict(news), fit_s=self._fit_s, view=view))

    def _view(self, streams: ExpertStreams) -> ControlView:
        status = self.loop.status()
        status |= {"streams": dict(streams.counters), "ignored": dict(self.matcher.counters), "fit_s": self._fit_s}
        if streams.last_error:
            status["last_error"] = streams.last_error
        if self._no_advice is not None:
            status["no_advice"] = self._no_advice
        return ControlView(
            status=status,
            advice=None
            if self.loop.advisor is None
            else shown_advice(self.loop.advisor, self._epoch_s, self._spare_kv_tokens),
            loads=self.loads.as_maps(),
        )

    def _event(self, event: ControlEvent) -> dict[str, Any]:
        return {
            "at_s": event.at_s + self._epoch_s,
            "kind": event.kind,
            "reason": event.reason,
            "values": {name: _plain(value) for name, value in event.values.items()},
        }


class RequestKeeper:
    """Keeps the newest requests, for `coterie advise`, where no loop runs because the router uses no fit."""

    def __init__(self, asked: SetUp, sent: SentRequests) -> None:
        self._asked, self._sent = asked, sent
        self._seen: tuple[Matcher, Traffic] | None = None
        """None before the first request, which shows the model's shape."""

    @property
    def traffic(self) -> Traffic | None:
        return None if self._seen is None else self._seen[1]

    def take(self, worker: str, event: RequestExperts | ExpertLoad, now_s: float) -> None:
        """Handle an event of a worker's stream; invalid ones are dropped."""
        if isinstance(event, ExpertLoad) or self._sent.name_of(event.request_id, worker) is None:
            return
        if self._seen is None:
            name, layers = self._asked.spec.model or "", len(event.layer_ids)
            shape = LoopShape(name, layers, event.num_experts, event.top_k, self._asked.rows)
            shape.check()
            self._seen = Matcher(shape, self._sent), Traffic(shape, self._asked.section.settings())
        matcher, traffic = self._seen
        matcher.expire(now_s)
        if isinstance(seen := matcher.take(worker, event, now_s), RequestSeen):
            traffic.add(seen)


def packed(traffic: Traffic, epoch_s: float) -> bytes:
    """Return the newest kept requests as JSON."""
    model, layers, experts, top_k, _ = traffic.shape
    newest = list(traffic.kept)[-max(1, MOST_KEPT_BYTES // (8 * layers * experts)) :]
    counts = b"".join(kept.prefill.tobytes() + kept.decode.tobytes() for kept in newest)
    finished_s = [kept.at_s + epoch_s for kept in newest]
    return msgspec.json.encode(KeptRequests(model, top_k, (len(newest), 2, layers, experts), finished_s, counts))


class RecentLoads:
    """Sums of each worker's loads over a sliding window of reports."""

    def __init__(self) -> None:
        self._pieces: dict[str, deque[NDArray[np.float64]]] = {}
        self._sums: dict[str, NDArray[np.float64]] = {}

    def add(self, seen: LoadSeen) -> None:
        if seen.worker not in self._pieces:
            if len(self._pieces) >= MOST_WORKERS:
                return
            self._pieces[seen.worker], self._sums[seen.worker] = deque(), np.zeros_like(seen.tokens)
        pieces, total = self._pieces[seen.worker], self._sums[seen.worker]
        pieces.append(seen.tokens)
        total += seen.tokens
        if len(pieces) > PIECES:  # counts are integers below 2^53, so the running sum is exact
            total -= pieces.popleft()

    def keep(self, workers: Collection[str]) -> None:
        """Forget all workers except these."""
        for worker in [known for known in self._pieces if known not in workers]:
            del self._pieces[worker], self._sums[worker]

    def as_maps(self) -> dict[str, HeatMap]:
        """Return the heat map of each worker."""
        return {worker: as_map(total) for worker, total in self._sums.items()}


def as_map(tokens: NDArray[np.float64]) -> HeatMap:
    """Make a heat map from `tokens` [layer, expert], cut to the size that a page can show."""
    experts = min(tokens.shape[1], MOST_CELLS)
    layers = min(len(tokens), MOST_CELLS // max(1, experts))
    whole = np.minimum(tokens[:layers, :experts], MOST_TOKENS).astype(np.int64)
    return HeatMap(layers, experts, msgspec.json.encode(whole.ravel().tolist()), len(tokens) - layers)


def _plain(value: Any) -> Any:
    """Convert a NumPy scalar to a Python number; return other values unchanged."""
    return value.item() if isinstance(value, np.generic) else value


SHOWN_ACTIONS = 16
"""Most actions of an advice that are shown."""


def advisor_of(asked: AdviseSection, shape: LoopShape, spec: RouterSpec) -> tuple[PlacementAdvisor, float]:
    """Return the advisor for a group, and the tokens of KV cache that a rank's spare slots displace.

    Raises CoterieError if the group does not fit the model or prices are unknown.
    """
    topology = Topology(asked.ranks, asked.ranks if asked.ranks_per_node is None else asked.ranks_per_node)
    name = asked.model or spec.model or shape.model
    model = step_model(get_model(name), asked.device, spec.dtype, topology=topology)
    objective = Objective.of(model, asked.step_tokens, asked.movement, horizon=asked.horizon)
    slots = asked.slots_per_rank if asked.slots_per_rank is not None else -(-shape.num_experts // asked.ranks)
    placement = Placement.linear(shape.num_layers, shape.num_experts, asked.ranks, slots * asked.ranks)
    if asked.placement is not None:
        given = read_map(asked.placement, model=name, num_ranks=asked.ranks)
        if given.shares is not None:
            Target.parse(ENGINE).check_split("weighted")
        placement = given.placement
    settings = AdviceSettings(window_s=asked.window_s, min_steps=asked.min_steps, cooldown_s=asked.cooldown_s)
    spare = placement.slots_per_rank - shape.num_experts / asked.ranks
    advisor = PlacementAdvisor(shape, topology, objective, placement, settings)
    return advisor, spare * model.spec.slot_kv_tokens(model.dtype)


def shown_advice(advisor: PlacementAdvisor, epoch_s: float, spare_kv_tokens: float) -> dict[str, Any] | None:
    """Return the current advice as plain values, or the last written one if the current one has no plan."""
    advice = advisor.advice
    if advisor.ended is not None and (advice is None or advice.plan is None):
        advice = advisor.ended
    if advice is None:
        return None
    maps = {worker: seen.version for worker, seen in advisor.reports.items()}
    return {
        "id": advice.id,
        "at_s": advice.at_s + epoch_s,
        "reason": advice.reason,
        "planned": advice.plan is not None,
        "gain_pct": advice.gain_pct,
        "gain_next_pct": advice.gain_next_pct,
        "steps": None if advice.steps is None else advice.steps._asdict(),
        "moves": advice.moves,
        "moved_bytes": advice.moved_bytes,
        "movement_s": advice.movement_s,
        "planning_s": advice.planning_s,
        "spare_kv_tokens": spare_kv_tokens,
        "actions": [asdict(action) for action in advice.actions[:SHOWN_ACTIONS]],
        "source": advice.source,
        "state": advice.state,
        "map_version": advice.map_version,
        "before": _ranks(advice.rank_s_before),
        "after": _ranks(advice.rank_s_after),
        "maps": maps,
        "in_force": max(maps.values(), default=None),
    }


def _ranks(rank_s: tuple[float, ...]) -> dict[str, Any] | None:
    """Return the balance and the seconds of each rank in a mean layer; None if there is no plan."""
    most = max(rank_s, default=0.0)
    return {"balance": float(np.mean(rank_s) / most), "rank_s": list(rank_s)} if most else None
