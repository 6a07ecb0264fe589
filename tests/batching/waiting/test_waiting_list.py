"""How a choice of several becomes a queue that is asked for one, or for a batch."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.errors import ConfigError
from waiting_engine import Engine, Request, load, make


def test_a_flatter_batch_than_in_order_of_arrival() -> None:
    engine = Engine(places=8)
    _, waiting = make(engine)
    for number in range(400):
        waiting.push(Request(number))
    spread: dict[str, list[float]] = {"ours": [], "arrival": []}
    for batch in range(40):
        ours = [waiting.pop() for _ in range(8)]
        spread["ours"].append(np.sum([load(r.number) for r in ours], axis=0).std())
        spread["arrival"].append(np.sum([load(n) for n in range(8 * batch, 8 * batch + 8)], axis=0).std())
    assert np.mean(spread["ours"]) < 0.8 * np.mean(spread["arrival"])


def test_places_that_free_one_by_one_get_a_selection_too() -> None:
    """A selection of 8 lasts for 8 places; of 1, the oldest is always next."""
    for batch_size, moves in ((8, True), (1, False)):
        engine = Engine(places=8, runs=[Request(1000 + n) for n in range(8)])
        chooser, waiting = make(engine, batch_size=batch_size)
        for number in range(64):
            waiting.push(Request(number))
        out = []
        for _ in range(64):
            engine.runs.pop(0)
            waiting.refresh()
            out.append(waiting.pop())
            engine.runs.append(out[-1])
        assert ([r.number for r in out] != list(range(64))) is moves
        assert (chooser.counters.moved > 0) is moves
        assert chooser.counters.worst_skips <= 64


def test_an_arrival_that_the_window_would_have_shown_makes_a_new_selection() -> None:
    engine = Engine()
    chooser, waiting = make(engine, window_size=4, batch_size=3)
    for number in range(4):
        waiting.push(Request(number))
    waiting.pop()
    assert chooser.counters.selections == 1
    waiting.push(Request(4))  # behind a window that was full
    waiting.pop()
    assert chooser.counters.selections == 1
    waiting.prepend(Request(5))
    assert waiting.pop().number == 5, "the oldest is first in a new selection"
    assert chooser.counters.selections == 2


def test_what_an_engine_looks_at_and_puts_back_keeps_its_place_and_its_skips() -> None:
    engine = Engine()
    _, waiting = make(engine, batch_size=4)
    for number in range(12):
        waiting.push(Request(number))
    for _ in range(3):  # the engine can start none of them, in three steps
        looked_at = [waiting.pop() for _ in range(4)]
        for request in reversed(looked_at):
            waiting.prepend(request)
        waiting.refresh()
        assert [request.number for request in waiting] == list(range(12))
        assert waiting.peek().number == 0


def test_a_batch_that_is_gone_makes_a_new_selection() -> None:
    engine = Engine(places=8, runs=[Request(100 + n) for n in range(8)])
    chooser, waiting = make(engine, batch_size=3)
    for number in range(10):
        waiting.push(Request(number))
    waiting.peek()
    del engine.runs[:3]
    waiting.refresh()
    waiting.peek()
    assert chooser.counters.selections == 1
    del engine.runs[:1]
    waiting.refresh()
    waiting.peek()
    assert chooser.counters.selections == 2


def test_an_empty_list() -> None:
    _, waiting = make(Engine())
    assert not waiting
    assert waiting.upcoming() == list(waiting) == []
    waiting.remove([Request(1)])
    for call in (waiting.peek, waiting.pop):
        with pytest.raises(IndexError):
            call()


def test_a_batch_is_what_popping_gives_and_may_be_put_back() -> None:
    """With blocked requests and priorities; what is put back in the step keeps its place and its skips."""
    for seed in range(8):
        lists = []
        for _ in range(2):
            _, waiting = make(Engine(places=3), "random", seed, max_skips=2, window_size=6, batch_size=3)
            for number in range(30):
                waiting.push(Request(number, blocked=number % 7 == 2))
            lists.append(waiting)
        batches, popped = lists
        while batches:
            before = [(r.number, batches.skips(r)) for r in batches]
            batch = batches.take_batch(3)
            popped.refresh()
            assert [r.number for r in batch.items] == [popped.pop().number for _ in batch.items]
            after = [(r.number, batches.skips(r)) for r in batches]
            assert after == [(r.number, popped.skips(r)) for r in popped]
            assert batch.skipped == [dict(before)[r.number] for r in batch.items]
            if len(before) % 5 == 0:
                for waiting, items in ((batches, batch.items), (popped, list(popped._handed_out))):
                    for request in items:
                        waiting.prepend(request)
                assert [number for number, _ in before] == [r.number for r in batches] == [r.number for r in popped]
                assert [batches.skips(r) for r in batch.items] == batch.skipped
                batches.remove(batch.items)
                popped.remove([r for r in popped if r.number in {one.number for one in batch.items}])


def test_a_batch_of_nobody_and_of_the_urgent() -> None:
    _, waiting = make(Engine())
    assert waiting.take_batch(4) == ([], [], "nobody waits")
    waiting.push(Request(0))
    assert waiting.take_batch(0) == ([], [], "no place is free")
    waiting.prepend(Request(1, stopped=True))
    with pytest.raises(ConfigError, match="urgent"):
        waiting.take_batch(4)
    assert waiting.pop().number == 1
    assert [request.number for request in waiting.take_batch(4).items] == [0]


def test_a_batch_without_a_known_load_is_of_the_oldest() -> None:
    engine = Engine(known=False)
    chooser, waiting = make(engine)
    for number in range(10):
        waiting.push(Request(number))
    batch = waiting.take_batch(4)
    assert [request.number for request in batch.items] == [0, 1, 2, 3]
    assert batch.reason == "in order of arrival"
    assert (chooser.counters.unknown, chooser.counters.handed_out, chooser.counters.moved) == (1, 4, 0)
    assert len(engine.told) == 1
