"""An abrupt change of the traffic on a live fleet: how soon the router is fitted anew, and what that gives.

    python lab/benchmarks/gateway/drift.py [--seed 0] [--rounds 6]

One prefill and three decode workers of coterie-tiny behind `coterie serve`, the control loop on, under a closed loop of
clients. A router is fitted to German, French and Spanish prompts; then all clients send Russian, Arabic and Japanese
ones: coterie-tiny's experts tell languages apart, not subjects. Measured: the time from the change to the swap,
requests that failed, and distinct experts a decode step, counted inside the workers.

Which fit is better is then measured apart, on prompts that neither was fitted to: the loop is off, and the fit from
before the change, the loop's own and a fresh one, made from all requests since the change, serve the same requests
round after round. The first requests of a round fill the fleet and are not measured. Who happens to run beside whom
moves the ratio of two fits by 1 to 1.5% a round, and twice that in rounds of 72 requests: intervals are Student's 95%
ones over the rounds. No request shares its KV cache with another (`cache_salt`), as prompts here are few: a router
sends one that came before to where it is cached, and a fit would be judged by where the one before it sent them.

At last the loop is given a worse fit, made from prompts and answers that do not belong together: it must keep its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.answers.load.run import StepTotals, experts_ratio, read_steps
from coterie.answers.runs import interval, with_ends
from coterie.control import ControlLoop, ControlSettings, FitJob, LoopShape, RequestSeen
from coterie.gateway.config import ControlSection, GatewayConfig
from coterie.gateway.control.matching import Matcher
from coterie.gateway.control.messages import StreamEntry
from coterie.gateway.control.streams import ExpertStreams
from coterie.gateway.embedded import ADVISED, OURS, EmbeddedFleet, run_embedded, tiny_fit_path
from coterie.gateway.fleet.spec import PoolShape, RouterSpec, maker
from coterie.net.http_client import Client
from coterie.net.processes import ServerProcess, free_port
from coterie.prompts import Prompt, load_prompts
from coterie.routing import Calibration, RouterFit
from coterie.wire.expert_events import ExpertMap

BEFORE, AFTER = ("de", "fr", "es"), ("ru", "ar", "ja")
"""Languages of the traffic before and after the change."""
MOST_BYTES = 500
"""Longer prompts are left out: they do not fit coterie-tiny's context in every script."""
IN_FLIGHT = 24
SHORTEST, LONGEST = 24, 64
"""Tokens of an answer."""
LEARN = 192
"""Requests that the first router is fitted to."""
SETTLE_S, LIMIT_S, LIVE_S = 10.0, 120.0, 45.0
"""Time of traffic before the change, the longest wait for the swap, and time after it."""
ROUND_REQUESTS, FIRST_REQUESTS = 240, 48
"""Requests of a round of the comparison under each fit, and those answered before it is measured."""
FITS = ("before", "loop", "fresh")


class Listener(threading.Thread):
    """Collects the fleet's requests from its expert events, as the loop's process does."""

    def __init__(self, config: GatewayConfig, secret: str | None, shape: LoopShape) -> None:
        super().__init__(name="drift-listener", daemon=True)
        self.seen: list[RequestSeen] = []
        self._streams, self._matcher = ExpertStreams(secret), Matcher(shape)
        self._streams.follow(
            StreamEntry(one.id, one.expert_events, one.secure_events)
            for one in config.workers
            if one.expert_events is not None
        )
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.is_set():
            self._streams.wait_for(0.1)
            for worker, event in self._streams.read():
                seen = None if isinstance(event, ExpertMap) else self._matcher.take(worker, event, time.monotonic())
                if isinstance(seen, RequestSeen):
                    self.seen.append(seen)
        self._streams.close()

    def stop(self) -> None:
        self._stopping.set()
        self.join()


class Clients:
    """A closed loop of clients."""

    def __init__(self, client: Client, rng: Generator) -> None:
        self.client, self.rng = client, rng
        self.prompts: list[Prompt] = []
        self.answered, self.failed = 0, list[str]()
        self._sent = 0

    async def ask(self, prompt: Prompt, tokens: int) -> None:
        self._sent += 1
        body = {
            "model": "coterie-tiny",
            "prompt": prompt.prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "cache_salt": f"drift.{self._sent}",
        }
        answer = await self.client.post("/v1/completions", body, f"drift.{self._sent}")
        self.answered += answer.problem is None
        if answer.problem is not None:
            self.failed.append(answer.problem)

    def drawn(self) -> tuple[Prompt, int]:
        prompt = self.prompts[int(self.rng.integers(len(self.prompts)))]
        return prompt, int(self.rng.integers(SHORTEST, LONGEST))

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """All clients send one request after the other for as long as the block runs."""
        stop = asyncio.Event()

        async def one() -> None:
            while not stop.is_set():
                await self.ask(*self.drawn())

        tasks = [asyncio.create_task(one()) for _ in range(IN_FLIGHT)]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*tasks)

    async def serve(self, requests: Sequence[tuple[Prompt, int]]) -> None:
        gate = asyncio.Semaphore(IN_FLIGHT)

        async def one(prompt: Prompt, tokens: int) -> None:
            async with gate:
                await self.ask(prompt, tokens)

        await asyncio.gather(*(one(*request) for request in requests))


class Bench:
    """The fleet, its gateway and its clients."""

    def __init__(self, fleet: EmbeddedFleet, seed: int) -> None:
        self.fleet, self.rng = fleet, np.random.default_rng(seed)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.path = fleet.folder / "gateway.yaml"
        argv = [sys.executable, "-m", "coterie", "serve", "--config", str(self.path)]
        self.gateway = ServerProcess(argv, self.url, fleet.folder / "gateway.log", fleet.access.environment)
        shipped = RouterFit.load(tiny_fit_path())
        self.shape = LoopShape(
            shipped.model, shipped.num_layers, shipped.num_experts, shipped.learned.top_k, len(fleet.workers) - 1
        )

    def config(self, fit: str | None, control: ControlSection) -> GatewayConfig:
        spec = RouterSpec("join_shortest_queue") if fit is None else RouterSpec(OURS, fit=fit)
        return self.fleet.config(f"127.0.0.1:{self.port}", decode=spec, control=control)

    def write(self, fit: str | None, control: ControlSection) -> None:
        self.path.write_bytes(msgspec.yaml.encode(self.config(fit, control)))

    async def reload(self, client: Client, fit: str | None, control: ControlSection) -> None:
        self.write(fit, control)
        status, text = await client.call("POST", "/reload")
        assert status == 200, text

    def fit(self, seen: Sequence[RequestSeen], seed: int) -> RouterFit:
        return FitJob(calibration_of(seen, self.shape), self.shape.workers, IN_FLIGHT // self.shape.workers, seed).run()


def calibration_of(seen: Sequence[RequestSeen], shape: LoopShape) -> Calibration:
    return Calibration(
        prefill=np.stack([one.prefill for one in seen]).astype(np.uint32),
        decode=np.stack([one.decode for one in seen]).astype(np.uint32),
        gates=None,
        requests=np.arange(len(seen)),
        halved=False,
        model=shape.model,
        top_k=shape.top_k,
    )


class Steps:
    """Distinct experts a step of the decode workers, since the last look."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients, self._after = clients, [0] * len(clients)

    async def look(self) -> StepTotals:
        logs: list[NDArray[np.float64]] = []
        for number, client in enumerate(self._clients):
            steps = await read_steps(client, self._after[number])
            self._after[number] = steps.total
            logs.append(steps.rows)
        return StepTotals.of(logs)


async def run(fleet: EmbeddedFleet, seed: int, rounds: int) -> dict[str, Any]:
    bench = Bench(fleet, seed)
    first, second = (halves(languages) for languages in (BEFORE, AFTER))
    bench.write(None, ControlSection(enabled=False))
    listener = Listener(bench.config(None, ADVISED), fleet.access.secret, bench.shape)
    listener.start()
    await asyncio.to_thread(bench.gateway.start)
    try:
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(Client(bench.url))
            workers = [
                await stack.enter_async_context(Client(one.url, key=fleet.access.key)) for one in fleet.workers[1:]
            ]
            clients, steps = Clients(client, bench.rng), Steps(workers)
            clients.prompts = first[0]
            await clients.serve([clients.drawn() for _ in range(LEARN)])
            start = str(fleet.folder / "before.safetensors")
            bench.fit(listener.seen[-LEARN:], seed).save(start)
            told = await live(bench, client, clients, steps, listener, first[0], second[0], start)
            print(f"swapped after {told['swap_s']} s; {told['live_experts']}", file=sys.stderr, flush=True)
            told["rounds"] = await compare(bench, client, clients, steps, second[1], told.pop("fits"), rounds)
            return {**told, "failed": clients.failed, "answered": clients.answered}
    finally:
        await asyncio.to_thread(bench.gateway.stop)
        listener.stop()


def halves(languages: Sequence[str]) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts of some languages: those of the traffic, and as many to compare fits on."""
    chosen = [one for one in load_prompts() if one.lang in languages and len(one.prompt.encode()) <= MOST_BYTES]
    return chosen[::2], chosen[1::2]


async def live(
    bench: Bench,
    client: Client,
    clients: Clients,
    steps: Steps,
    listener: Listener,
    first: list[Prompt],
    second: list[Prompt],
    start: str,
) -> dict[str, Any]:
    """The change of the traffic, with the loop on."""
    await bench.reload(client, start, ADVISED)
    clients.prompts = first
    async with clients.working():
        await asyncio.sleep(SETTLE_S)
        while not await loop_runs(client):
            await asyncio.sleep(0.2)
        await steps.look()
        await asyncio.sleep(SETTLE_S)
        before = await steps.look()
        events = len(await decisions(client))
        clients.prompts, changed, known = second, time.monotonic(), len(listener.seen)
        fits: list[tuple[float, str]] = []
        while not fits and time.monotonic() < changed + LIMIT_S:
            await asyncio.sleep(0.1)
            fits = [(time.monotonic() - changed, fit) for fit in [await fit_in_force(client)] if fit != start]
        between = await steps.look()
        await asyncio.sleep(LIVE_S)
        after = await steps.look()
        told = (await decisions(client))[events:]
        last = await fit_in_force(client)
        kept = bench.fleet.folder / "loop.safetensors"
        shutil.copyfile(last, kept)
    seen = listener.seen[known:]
    fresh = bench.fleet.folder / "fresh.safetensors"
    started = time.perf_counter()
    bench.fit(seen, 1).save(fresh)
    fit_s = time.perf_counter() - started
    return {
        "swap_s": fits[0][0] if fits else None,
        "live_experts": {
            "before the change": before.experts_by_token,
            "until the swap": between.experts_by_token,
            "after the swap": after.experts_by_token,
        },
        "requests_per_s": len(seen) / (time.monotonic() - changed),
        "fresh_fit_s": fit_s,
        "events": told,
        "worse": worse_is_kept(bench, RouterFit.load(start), listener.seen[:known], seen),
        "fits": {"before": start, "loop": str(kept), "fresh": str(fresh)},
    }


async def loop_runs(client: Client) -> bool:
    """Whether the loop has seen requests."""
    text = (await client.call("GET", "/metrics"))[1]
    line = next(
        line for line in text.splitlines() if line.startswith('coterie_gateway_control_stream_total{kind="messages"}')
    )
    return float(line.rpartition(" ")[2]) > 0


async def decisions(client: Client) -> list[dict[str, Any]]:
    return list(json.loads((await client.call("GET", "/decisions?last=500"))[1])["control"])


async def fit_in_force(client: Client) -> str:
    return str(json.loads((await client.call("GET", "/routers"))[1])["decode"]["fit"])


async def compare(
    bench: Bench,
    client: Client,
    clients: Clients,
    steps: Steps,
    prompts: list[Prompt],
    fits: dict[str, str],
    rounds: int,
) -> dict[str, list[float]]:
    """Experts a step under each fit, round by round, as a share of those under the fit before the change."""
    clients.prompts = prompts
    ratios: dict[str, list[float]] = {"loop": [], "fresh": [], "loop against fresh": []}
    for number in range(rounds):
        requests = [clients.drawn() for _ in range(ROUND_REQUESTS)]
        found: dict[str, StepTotals] = {}
        for name in np.roll(FITS, number):  # none is always first
            await bench.reload(client, fits[str(name)], ControlSection(enabled=False))
            found[str(name)] = await measured(clients, steps, requests)
        for name in ("loop", "fresh"):
            ratios[name].append(100 * (experts_ratio(found["before"], found[name]) or np.nan))
        ratios["loop against fresh"].append(100 * (experts_ratio(found["fresh"], found["loop"]) or np.nan))
        print(f"round {number + 1} of {rounds} done", file=sys.stderr)
    return ratios


async def measured(clients: Clients, steps: Steps, requests: Sequence[tuple[Prompt, int]]) -> StepTotals:
    """Steps of these requests, from when the first of them were answered on."""
    answered = clients.answered + len(clients.failed)
    serving = asyncio.create_task(clients.serve(requests))
    while not serving.done() and clients.answered + len(clients.failed) < answered + FIRST_REQUESTS:
        await asyncio.sleep(0.05)
    await steps.look()
    await serving
    return await steps.look()


def worse_is_kept(
    bench: Bench, start: RouterFit, before: Sequence[RequestSeen], after: Sequence[RequestSeen]
) -> dict[str, Any]:
    """Replay the run to the loop, and answer its job with a fit whose prompts and answers were shuffled apart."""
    spec, shape = RouterSpec(OURS), bench.shape

    def make(fit: RouterFit) -> Any:
        return maker(spec, {"fitted": fit})(PoolShape(shape.workers, {})).router

    loop = ControlLoop(shape, start, make, ControlSettings(), batch=start.batch, now_s=0.0)
    events: list[Any] = []
    for number, seen in enumerate([*before[-LEARN:], *after]):
        loop.observe(seen._replace(at_s=0.1 * number))
        tick = loop.tick(0.1 * number)
        events += tick.events
        if tick.job is not None:
            known = tick.job.calibration
            mixed = known._replace(decode=bench.rng.permuted(known.decode, axis=2))
            bad = RouterFit(shape.workers, start.batch).fit(mixed, np.random.default_rng(0))
            loop.candidate(bad, 0.0)
    return {
        "taken": sum(event.kind == "refit_taken" for event in events),
        "kept": sum(event.kind == "refit_kept" for event in events),
        "reasons": [event.reason for event in events if event.kind == "refit_kept"],
    }


def report(told: dict[str, Any]) -> Iterator[str]:
    swap = told["swap_s"]
    yield f"| from the change to the swap | {'never' if swap is None else f'{swap:.1f} s'} |"
    yield "|---|---|"
    yield f"| requests answered, failed | {told['answered']:,}, {len(told['failed'])} |"
    yield f"| requests a second | {told['requests_per_s']:.1f} |"
    for name, value in told["live_experts"].items():
        yield f"| experts a step, {name} | {value:.2f} |"
    for name, samples in told["rounds"].items():
        beside = "" if "against" in name else " against the fit before"
        yield f"| experts a step at equal rows, {name}{beside} (%) | {with_ends(interval(samples), sign='')} |"
    worse = told["worse"]
    yield f"| a worse fit: taken, kept | {worse['taken']}, {worse['kept']} |"
    yield f"| a fresh fit takes | {told['fresh_fit_s']:.2f} s |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=6, help="of the comparison of fits")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} must be at least 1")
    with run_embedded() as fleet:
        told = asyncio.run(run(fleet, options.seed, options.rounds))
    print("\n".join(report(told)))
    for event in told["events"]:
        print(f"{event['kind']}: {event['reason']}")


if __name__ == "__main__":
    main()
