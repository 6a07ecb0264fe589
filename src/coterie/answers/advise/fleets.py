"""Decisions of a fleet of decoders: which router, which batches, which CUDA graphs.

All arms serve the same requests in the same splits as `coterie fleet`, so that gains are paired.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie.answers.advise.decisions import Arm, Lever, advice_of, unknown
from coterie.answers.fleet.bench import Source
from coterie.answers.fleet.simulation import SHORTEST_QUEUE, FleetReport, FleetSettings, simulate_fleet
from coterie.answers.runs import WORTH_PCT, with_ends
from coterie.answers.suites import Report
from coterie.answers.verdicts import tail_said
from coterie.costs.step import VLLM_GRAPHS, CostOptions, StepModel
from coterie.types import Interval
from coterie.units import counted

BY_PREFIX = "joint:experts=0"
"""Router by cached prefix and load alone."""
BY_EXPERTS = ("latency_aware", "locality_band")
STRATEGY = "latency_aware"
WAITING = 3
"""Requests in flight per place where batches are chosen: twice as many wait as run, or there would be little choice."""
ONE_BY_ONE = 64
"""Largest batch with a CUDA graph of its own in the arm for graph sizes; larger batches have few idle experts."""

TITLES = {
    "routing": "Routing: which decoder takes a request",
    "batching": "Batching: which waiting requests start next",
    "graph_sizes": "Graph sizes: rows that pad a decode batch",
}


@dataclass(frozen=True, slots=True, eq=False)
class Fleets:
    """The traffic, the fleet, and how they are simulated."""

    source: Source
    model: StepModel
    settings: FleetSettings
    report: Report = lambda *_: None

    @property
    def where(self) -> str:
        return f"{self.of_model} on {self.deployment}"

    @property
    def deployment(self) -> str:
        """Return the fleet in words."""
        gpus, count = self.model.topology.num_ranks, self.settings.decoders
        decoders = counted(count, "one-GPU decoder" if gpus == 1 else "decoder") + f" of {gpus} GPUs" * (gpus > 1)
        return f"{decoders}, {self.settings.in_flight} requests on each"

    @property
    def of_model(self) -> str:
        return f"for {self.model.spec.name} in {self.model.dtype}"

    @property
    def prefixes(self) -> bool:
        return self.source.trace.requests.prefix_blocks is not None

    @property
    def metric(self) -> tuple[str, str]:
        """Metric of routers, and its name. Where decoders compute prompts, requests wait for them: TPOT hides that."""
        return ("e2e.mean", "mean request time") if self.settings.prompts else ("tpot.mean", "mean TPOT")

    def decisions(self) -> Iterator[Lever]:
        most = self.settings.decoders * self.settings.in_flight
        recorded = len(self.source.counts.requests)
        if recorded // 2 < most:
            why = f"{most} requests in flight need twice as many recorded ones, and there are {recorded}: record more"
            yield from (unknown(key, title, self.where, why) for key, title in TITLES.items())
            return
        served = self._simulate("routing", routers=self._routers())
        yield self._routing(served, self._together())
        yield self._batching()
        yield self._graphs()

    def _routers(self) -> tuple[str, ...]:
        return (SHORTEST_QUEUE, *([BY_PREFIX] if self.prefixes else []), *BY_EXPERTS)

    def _simulate(
        self, what: str, model: StepModel | None = None, source: Source | None = None, **changes: Any
    ) -> FleetReport:
        def report(_: str, done: int, total: int) -> None:
            self.report(f"Simulating {what}", done, total)

        used, settings = source or self.source, replace(self.settings, **changes)
        return simulate_fleet(used.trace, model or self.model, settings, report, used)

    def _together(self) -> list[FleetReport]:
        """Simulate the earlier and the later half of the recording, each by itself; none if it has no times.

        The whole recording keeps requests in flight together that were hours apart. A router that tells an earlier from
        a later kind of traffic saves time there, and none on a live fleet.
        """
        counts, arrival_s = self.source.counts, self.source.trace.requests.arrival_s
        if arrival_s is None:
            return []
        halves = np.array_split(np.argsort(np.asarray(arrival_s)[counts.requests], kind="stable"), 2)
        in_flight = min(self.settings.in_flight, len(halves[1]) // 2 // self.settings.decoders)
        if in_flight < 2:
            return []
        changes: dict[str, Any] = {
            "in_flight": in_flight,
            "splits": max(2, self.settings.splits // 2),
            "routers": self._routers(),
        }
        return [
            self._simulate("routing", source=Source(self.source.trace, counts.take(np.sort(half))), **changes)
            for half in halves
        ]

    def _arms(self, served: FleetReport, together: list[FleetReport]) -> tuple[Arm, ...]:
        """Return the routers with their gains; where only the whole has a gain, that of requests served together."""
        metric, arms = self.metric[0], []
        for name in self._routers()[1:]:
            gain, tail = (served.saved(key, name, SHORTEST_QUEUE) for key in (metric, metric.replace("mean", "p99")))
            parts = [part.saved(metric, name, SHORTEST_QUEUE) for part in together]
            if parts and max(part.mean for part in parts) < WORTH_PCT <= gain.mean:
                gain = min(parts, key=lambda part: part.mean)
            arms.append(Arm(name, gain, tail))
        return tuple(arms)

    def _routing(self, served: FleetReport, together: list[FleetReport]) -> Lever:
        arms = self._arms(served, together)
        best = max(arms, key=lambda arm: arm.rank)
        assert best.tail
        by_experts = best.name in BY_EXPERTS
        footprints = "; it needs footprints, from prefill workers with the plugin or predicted" * by_experts
        return Lever(
            key="routing",
            title=TITLES["routing"],
            advice=advice_of(best.gain, best.tail),
            chosen=best.name,
            against="the shortest queue",
            metric=self.metric[1],
            gain=best.gain,
            where=self.where,
            facts=(
                tail_said(best.gain, best.tail),
                self._experts_add(served, best) if by_experts else "",
                self._why_not(best.gain, served.saved(self.metric[0], best.name, SHORTEST_QUEUE)),
            ),
            do=f"decode: {{router: {best.name!r}, fit: router.safetensors}} in the gateway's config{footprints}",
            tail=best.tail,
            arms=arms,
            data={"router": best.name},
        )

    def _experts_add(self, served: FleetReport, best: Arm) -> str:
        """Say what a router by experts adds to the best one that does not look at them."""
        if best.gain.mean < WORTH_PCT:
            return ""
        plain = SHORTEST_QUEUE
        if self.prefixes and served.saved(self.metric[0], BY_PREFIX, SHORTEST_QUEUE).mean > 0:
            plain = BY_PREFIX
        fewer = f"a step reads {served.saved('distinct_by_token', best.name, plain).mean:.1f}% fewer experts"
        if plain == SHORTEST_QUEUE:
            return fewer
        gain = with_ends(served.saved(self.metric[0], best.name, plain), unit="%")
        return f"{gain} of that against {plain}, which does not look at experts: {fewer}"

    def _why_not(self, gain: Interval, of_all: Interval) -> str:
        if gain.mean >= WORTH_PCT:
            return ""
        if self.settings.decoders == 1:
            return "with one decoder there is nothing to choose"
        if of_all.mean >= WORTH_PCT:
            return f"the {of_all.mean:.1f}% on all requests are of earlier and later ones, which never run together"
        return "requests differ too little in what they need"

    def _batching(self) -> Lever:
        """Compare strategies where as many requests wait as run; with a place for everyone nothing is chosen."""
        ask, decoders = self.settings, max(1, self.settings.decoders // WAITING)
        places = max(1, ask.decoders * ask.in_flight // (decoders * WAITING))
        changed: dict[str, Any] = {
            "decoders": decoders,
            "in_flight": WAITING * places,
            "places": places,
            "routers": (SHORTEST_QUEUE,),
            "prompts": False,
            "kv_tokens": None,
            "prefill": 0,
        }
        in_order = self._simulate("batching", **changed)
        chosen = self._simulate("batching", **changed, strategy=STRATEGY)
        gain, tail = (
            chosen.saved(metric, SHORTEST_QUEUE, SHORTEST_QUEUE, in_order) for metric in ("e2e.mean", "e2e.p99")
        )
        return Lever(
            key="batching",
            title=TITLES["batching"],
            advice=advice_of(gain, tail),
            chosen=STRATEGY,
            against="first come, first served",
            metric="mean request time",
            gain=gain,
            where=f"{self.of_model} on a decoder with {places} requests running and {2 * places} waiting",
            facts=(tail_said(gain, tail),),
            do="vLLM's --scheduler-cls, see docs/engines/vllm.md",
            tail=tail,
            arms=(Arm(STRATEGY, gain, tail),),
            data={"strategy": STRATEGY},
        )

    def _graphs(self) -> Lever:
        """Compare vLLM's graph sizes with one graph for every small batch, under the router that runs now."""
        own = tuple(sorted({*range(1, ONE_BY_ONE + 1), *VLLM_GRAPHS}))
        padded, exact = (
            self._simulate(
                "graph sizes",
                replace(self.model, options=CostOptions(graph_sizes=sizes, padding=1.0)),
                routers=(SHORTEST_QUEUE,),
            )
            for sizes in (VLLM_GRAPHS, own)
        )
        gain = exact.saved("tpot.mean", SHORTEST_QUEUE, SHORTEST_QUEUE, padded)
        size = CostOptions(graph_sizes=VLLM_GRAPHS).padded(self.settings.in_flight)
        added = size - self.settings.in_flight
        rows = f"a batch of {self.settings.in_flight} is padded to {size}"
        return Lever(
            key="graph_sizes",
            title=TITLES["graph_sizes"],
            advice=advice_of(gain),
            chosen=f"a CUDA graph for every batch up to {ONE_BY_ONE}",
            against="vLLM's own sizes",
            metric="mean TPOT",
            gain=gain,
            where=self.where,
            facts=(
                rows if added else f"a batch of {size} has a graph of its own",
                "at most that: padding rows are taken to choose experts of their own; an engine may mask them",
            ),
            do='--compilation-config \'{"cudagraph_capture_sizes": [' + ", ".join(map(str, own)) + "]}'",
            arms=(Arm("a graph for every batch", gain),),
            data={"graph_sizes": list(own), "padding_rows": added},
        )
