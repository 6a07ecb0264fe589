"""A controller of a simulated fleet: what it is told, what it may do, and that it changes nothing by watching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from books import check_fleet
from coterie.costs.presets import step_model
from coterie.footprints.counting import footprint
from coterie.routing import Decision, Fleet, Request
from coterie.sim.fleet.requests import FinishedRequest, FleetRequests, Recordings, RouterSwap
from coterie.sim.fleet.run import FleetConfig, run_fleet
from fleet_checks import run_checked
from fleet_steps import SPEC

MODEL = step_model(SPEC, "h200")
CONFIG = FleetConfig(decode_workers=2, places=8)


@dataclass(frozen=True)
class Always:
    """One decoder for all."""

    worker: int

    def route(self, request: Request, fleet: Fleet) -> Decision:  # noqa: ARG002  (the contract's)
        return Decision(self.worker, np.zeros(len(fleet)), "always")


class Watching:
    """Swaps the router after so many requests have ended; None never."""

    def __init__(self, after: int | None = None) -> None:
        self.after, self.ended = after, list[FinishedRequest]()
        self.times: list[float] = []
        self.fleet = Fleet([8, 8])
        self.swapped_s: float | None = None

    def tick(self, now_s: float, ended: Sequence[FinishedRequest]) -> RouterSwap | None:
        self.times.append(now_s)
        self.ended += ended
        if self.after is None or len(self.ended) < self.after or self.swapped_s is not None:
            return None
        self.swapped_s = now_s
        return RouterSwap(Always(1), self.fleet)


def requests(count: int = 40) -> FleetRequests:
    rng = np.random.default_rng(0)
    prompt, decode = rng.integers(1, 9, count), rng.integers(1, 9, count)
    first = np.concatenate([[0], np.cumsum(prompt + decode)[:-1]])
    shape = (int((prompt + decode).sum()), SPEC.num_moe_layers, SPEC.num_experts)
    ids = rng.random(shape).argsort(axis=2)[:, :, : SPEC.top_k].astype(np.uint8)
    recordings = Recordings(ids, SPEC.num_experts, first, prompt, first + prompt, decode)
    return FleetRequests(recordings, np.arange(count), prompt, decode + rng.integers(0, 20, count))


def test_watching_changes_nothing() -> None:
    served = requests()
    plain = run_fleet(served, MODEL, Always(0), CONFIG, in_flight=6)
    watched = run_checked(served, MODEL, Always(0), CONFIG, in_flight=6, controller=Watching())
    for name, before, after in zip(plain._fields, plain, watched, strict=True):
        assert np.asarray(before).tobytes() == np.asarray(after).tobytes(), name


def test_it_is_told_of_every_request_that_ended_with_its_recorded_experts() -> None:
    served, controller = requests(), Watching()
    run = run_fleet(served, MODEL, Always(0), CONFIG, in_flight=6, controller=controller)
    assert controller.times == sorted(controller.times)
    assert len(controller.ended) == 40 - 6, "those that end after the last decision are not told"
    kept = served.recordings
    for one in controller.ended:
        assert one.at_s == run.finish_s[one.request]
        assert one.worker == run.decoder[one.request]
        first, rows, tokens = (int(a[one.recorded]) for a in (kept.decode_row, kept.decode_rows, served.output_tokens))
        ids = kept.expert_ids[first + np.arange(tokens) % rows]
        assert np.array_equal(one.decode, footprint(ids, SPEC.num_experts))
        prompt = kept.expert_ids[kept.prompt_row[one.recorded] :][: kept.prompt_rows[one.recorded]]
        assert np.array_equal(one.prefill, footprint(prompt, SPEC.num_experts))


def test_a_swap_holds_from_the_next_decision_and_loses_no_request() -> None:
    controller = Watching(after=10)
    run = run_checked(requests(), MODEL, Always(0), CONFIG, in_flight=6, controller=controller)
    assert controller.swapped_s is not None
    assert np.isfinite(run.finish_s).all()
    assert (run.decoder[run.arrival_s < controller.swapped_s] == 0).all()
    assert (run.decoder[run.arrival_s > controller.swapped_s] == 1).all()
    assert (run.decoder == 1).sum() >= 20
    check_fleet(controller.fleet)
