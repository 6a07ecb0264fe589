"""Wrong, late, doubled and hostile values: no error, no action, all counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.random import Generator

from control_traffic import OLD, SHAPE, drive, fitted, loop_of, made_requests
from coterie.control import ControlLoop, LoadSeen, RequestSeen
from coterie.control.intake import REMEMBERED_IDS
from coterie.routing import RouterFit

COUNTS = (SHAPE.num_layers, SHAPE.num_experts)


@pytest.fixture(scope="module")
def fit() -> RouterFit:
    return fitted(made_requests(np.random.default_rng(0), OLD, 64))


def wrong_arrays(rng: Generator) -> list[Any]:
    good = rng.integers(1, 9, COUNTS)
    layer, expert = int(rng.integers(COUNTS[0])), int(rng.integers(COUNTS[1]))
    negative, huge, uneven, whole = good.copy(), good.copy(), good.copy(), good.astype(np.float64)
    negative[layer, expert] = -1
    huge[layer, expert] = np.iinfo(np.int64).max
    uneven[layer] = 0
    whole[layer, expert] = rng.choice([np.nan, np.inf, -np.inf])
    return [
        negative,
        huge,
        uneven,
        whole,
        np.zeros(COUNTS, np.int64),
        good > 4,
        good.astype(object),
        good.astype(np.complex128),
        good.astype("U8"),
        good[:-1],
        good[:, :-1],
        good[None],
        good.ravel(),
        np.empty((0, 0), np.int64),
        good.tolist(),
        None,
        "counts",
        7,
    ]


def wrong_numbers(rng: Generator) -> list[Any]:
    return [
        float("nan"),
        float("inf"),
        -float("inf"),
        True,
        None,
        "now",
        10**400,
        1e300,
        -1e300,
        [1.0],
        np.bool_(True),
        np.float64("nan"),
        complex(1, 2),
        object(),
        -float(rng.integers(1000, 9999)),
    ]


def wrong_names(rng: Generator) -> list[Any]:
    return ["", None, 5, b"w0", ["w0"], "x" * int(rng.integers(513, 4000)), object(), float("nan")]


def pick(rng: Generator, choices: list[Any]) -> Any:
    return choices[int(rng.integers(len(choices)))]


def hostile(rng: Generator, now_s: float, seen: list[RequestSeen]) -> Any:
    """A value that is wrong in one way at least; `seen` were observed before."""
    counts = rng.integers(1, 9, COUNTS)
    request = RequestSeen(now_s, f"h{rng.integers(1 << 60)}", "w0", counts, counts)
    load = LoadSeen(now_s, "w0", counts.astype(np.float64), 10, 1.0)
    kind = int(rng.integers(12))
    if kind == 0:
        return request._replace(**{pick(rng, ["prefill", "decode"]): pick(rng, wrong_arrays(rng))})
    if kind == 1:
        arrays = [one for one in wrong_arrays(rng) if not (isinstance(one, np.ndarray) and one.dtype.kind == "i")]
        return load._replace(tokens=pick(rng, [one for one in arrays if one is not None]))
    if kind == 2:
        return request._replace(at_s=pick(rng, wrong_numbers(rng)))
    if kind == 3:
        return load._replace(at_s=pick(rng, wrong_numbers(rng)))
    if kind == 4:
        return load._replace(seconds=pick(rng, wrong_numbers(rng)))
    if kind == 5:
        return load._replace(steps=pick(rng, [*wrong_numbers(rng), 0, 1.5, 1 << 40]))
    if kind == 6:
        return request._replace(request_id=pick(rng, wrong_names(rng)))
    if kind == 7:
        return pick(rng, [request, load])._replace(worker=pick(rng, wrong_names(rng)))
    if kind == 8:
        return pick(rng, seen)  # doubled
    if kind == 9:
        return request._replace(at_s=now_s + float(rng.uniform(100, 1e9)))
    if kind == 10:
        return request._replace(at_s=now_s - float(rng.uniform(700, 1e9)))
    return pick(rng, [None, 3, "event", (1, 2), {}, [], object(), np.zeros(3)])


def state_of(loop: ControlLoop) -> tuple[Any, ...]:
    kept = tuple(one.serial for one in loop.traffic.kept)
    return kept, loop.traffic.serial, loop.fit, loop.counters["requests"], loop.counters["loads"]


def bombard(fit: RouterFit, count: int, seed: int) -> None:
    rng, loop = np.random.default_rng(seed), loop_of(fit)
    seen = made_requests(rng, OLD, 40)
    drive(loop, seen)
    before, now_s = state_of(loop), loop.intake.now_s
    for at in range(count):
        loop.observe(hostile(rng, now_s, seen))
        if at % 50 == 49:
            tick = loop.tick(now_s)
            assert tick.job is None
            assert tick.use is None
            assert {event.kind for event in tick.events} <= {"ignored"}
    assert state_of(loop) == before
    assert sum(number for name, number in loop.counters.items() if name.startswith("ignored_")) == count
    kinds = drive(loop, made_requests(rng, OLD, 64, 40))
    assert set(kinds) <= {"no_drift", "ignored"}, "good data is used as before"
    assert loop.counters["requests"] == 104


@pytest.mark.parametrize("seed", range(3))
def test_hostile_values_are_counted_and_change_nothing(fit: RouterFit, seed: int) -> None:
    bombard(fit, 400, seed)


def test_ten_thousand_hostile_values(fit: RouterFit) -> None:
    bombard(fit, 10_000, 99)


def test_more_than_a_worker_can_report_between_two_ticks_is_left_out(fit: RouterFit) -> None:
    loop, one = loop_of(fit), made_requests(np.random.default_rng(1), OLD, 1)[0]
    most = loop.settings.per_tick
    for at in range(most + 7):
        loop.observe(one._replace(request_id=f"r{at}"))
    assert loop.counters["ignored_flood"] == 7
    loop.tick(1.0)
    loop.observe(one._replace(request_id="later"))
    assert loop.counters["requests"] == most + 1


def test_lost_and_late_requests_are_only_fewer(fit: RouterFit) -> None:
    """Half of the requests are lost, others come in another order: nothing is ignored, nothing is done."""
    rng, loop = np.random.default_rng(2), loop_of(fit)
    seen = [one for one in made_requests(rng, OLD, 200) if rng.random() < 0.5]
    for at in range(0, len(seen) - 8, 8):
        seen[at : at + 8] = [seen[at + int(place)] for place in rng.permutation(8)]
    assert set(drive(loop, seen)) <= {"no_drift"}
    assert not [name for name in loop.counters if name.startswith("ignored_")]


def test_ids_are_remembered_up_to_a_number(fit: RouterFit) -> None:
    loop = loop_of(fit)
    assert 2 * loop.settings.per_tick < REMEMBERED_IDS
    one = made_requests(np.random.default_rng(1), OLD, 1)[0]
    loop.observe(one)
    loop.observe(one)
    assert loop.counters == {"requests": 1, "loads": 0, "ignored_doubled": 1}
