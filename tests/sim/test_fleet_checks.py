"""Every rule of a fleet's run can be broken, and is then named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from coterie.costs.presets import step_model
from coterie.routing.base import Decision, Request
from coterie.routing.fleet import Fleet
from coterie.sim.fleet.metrics import FleetRun
from coterie.sim.fleet.requests import FleetRequests, Recordings
from coterie.sim.fleet.run import FleetConfig
from coterie.types import ModelSpec
from fleet_checks import check_run, run_checked
from sim_checks import InvariantError

SPEC = ModelSpec(
    "small",
    num_layers=2,
    num_experts=8,
    top_k=2,
    hidden_size=256,
    expert_intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=500,
)


CONFIG = FleetConfig(decode_workers=2, prefill_workers=1, places=3)


@dataclass(frozen=True)
class InTurn:
    def route(self, request: Request, fleet: Fleet) -> Decision:
        return Decision(int(request.id) % len(fleet), np.zeros(len(fleet)), "in turn")


@pytest.fixture(scope="module")
def served() -> tuple[FleetRun, FleetRequests]:
    rng = np.random.default_rng(0)
    ids = rng.random((200, 2, 8)).argsort(axis=2)[:, :, :2].astype(np.uint8)
    first = np.arange(20) * 10
    made = Recordings(ids, 8, first, np.full(20, 4), first + 4, np.full(20, 6))
    times = np.sort(rng.random(20)) * 2e-3
    requests = FleetRequests(made, np.arange(20), np.full(20, 30), np.full(20, 6), times)
    return run_checked(requests, step_model(SPEC), InTurn(), CONFIG), requests


def moved(run: FleetRun, field: str, row: int, change: Callable[[float], float]) -> FleetRun:
    column = getattr(run, field).copy()
    column[row] = change(column[row])
    return run._replace(**{field: column})


BROKEN: dict[str, tuple[str, Callable[[FleetRun], FleetRun]]] = {
    "a lost request": ("INV-29", lambda run: moved(run, "finish_s", 3, lambda _: np.nan)),
    "one that is left": ("INV-19", lambda run: moved(run, "finish_s", 3, lambda _: np.nan)._replace(queued=1)),
    "a token too few": ("INV-19", lambda run: moved(run, "decoded", 3, lambda value: value - 1)),
    "KV before its prompt": ("INV-20", lambda run: moved(run, "ready_s", 3, lambda _: 0.0)),
    "an early first token": ("INV-20", lambda run: moved(run, "first_token_s", 3, lambda _: 0.0)),
    "memory that is not there": ("INV-30", lambda run: moved(run, "kv_most", 1, lambda _: 1e18)),
    "memory that nobody frees": ("INV-30", lambda run: moved(run, "kv_held", 1, lambda _: 2)),
    "a fourth on three places": (
        "INV-30",
        lambda run: run._replace(finish_s=np.where(run.decoder == 0, run.finish_s + 1.0, run.finish_s)),
    ),
    "steps that overlap": ("INV-21", lambda run: moved(run, "step_s", 5, lambda value: value + 1.0)),
    "an idle worker": ("INV-21", lambda run: run._replace(step_s=run.step_s * 0.5)),
    "a wrong count of experts": (
        "INV-31",
        lambda run: moved(run, "step_distinct", int(np.flatnonzero(run.step_decoding)[4]), lambda v: v + 0.5),
    ),
    "another batch": (
        "INV-31",
        lambda run: moved(run, "step_decoding", int(np.flatnonzero(run.step_decoding == 2)[0]), lambda _: 1),
    ),
}


def check(run: FleetRun, requests: FleetRequests) -> None:
    check_run(run, requests, CONFIG)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_run_is_caught(name: str, served: tuple[FleetRun, FleetRequests]) -> None:
    run, requests = served
    check(run, requests)
    rule, breaking = BROKEN[name]
    with pytest.raises(InvariantError, match=rule):
        check(breaking(run), requests)


def test_a_recording_twice_in_flight_is_caught(served: tuple[FleetRun, FleetRequests]) -> None:
    run, requests = served
    overlapping = np.flatnonzero(run.arrival_s[1:] < run.finish_s[:-1])[0]
    recorded = requests.recorded.copy()
    recorded[overlapping + 1] = recorded[overlapping]
    twice = FleetRequests(requests.recordings, recorded, requests.prompt_tokens, requests.output_tokens, run.arrival_s)
    with pytest.raises(InvariantError, match=r"INV-32"):
        check(run, twice)
