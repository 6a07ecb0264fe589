"""Waiting requests in a strategy's order, in real vLLM servers and against vLLM's own queues."""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.parse
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.batching.scheduler import Scheduler, SchedulerConfig
from coterie.batching.waiting import BatchTrigger
from coterie.engines.tiny import tiny_model_path
from coterie.engines.waiting_settings import OrderingSettings
from coterie.errors import ConfigError
from coterie.predictors import PredictRequest, TokenTable
from coterie.wire.footprints import KEY, WireFootprint, encode_footprint
from vllm_checks import NUM_EXPERTS, Listener
from vllm_servers import MODEL, Fleet, Server, needs_vllm

pytestmark = [pytest.mark.vllm, needs_vllm]

QUEUED, PLACES, SKIPS = 1000, 8, 5
LAYERS, VOCABULARY = 8, 4096
PLUGIN = {"footprint": "never", "load_interval_s": 0.2, "events_queue": 4096}


# Real servers.


@pytest.fixture(scope="module")
def table_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from coterie.engines.transformers import load_model
    from coterie.engines.transformers.dry_run import dry_run_table

    file = tmp_path_factory.mktemp("table") / "table.safetensors"
    dry_run_table(load_model(tiny_model_path()).model).save(file)
    return file


@pytest.fixture(scope="module")
def servers(fleet: Fleet, table_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Server, ...]:
    """vLLM as it is; first come with a table; by priority, with footprints or nothing, and little memory."""
    folder = tmp_path_factory.mktemp("decisions")

    def how(kind: str, name: str, *extra: str, **more: Any) -> dict[str, Any]:
        ours = {"strategy": "greedy_variance", "max_skips": SKIPS, "decisions": str(folder / name), **more}
        return {
            "settings": PLUGIN,
            "env": {"VLLM_SERVER_DEV_MODE": "1"},  # for /pause
            "extra": (
                "--max-num-seqs",
                str(PLACES),
                "--scheduler-cls",
                f"coterie.engines.vllm.scheduler.{kind}",
                "--additional-config",
                json.dumps({"coterie": {"scheduler": ours}}),
                *extra,
            ),
        }

    started = fleet.start(
        {
            "plain": {},
            "ordered": how("ExpertAwareScheduler", "ordered", loads=str(table_file)),
            # The class for async scheduling, which a CPU runs in step.
            "priority": how(
                "ExpertAwareAsyncScheduler",
                "priority",
                "--scheduling-policy",
                "priority",
                "--num-gpu-blocks-override",
                "20",
            ),
        }
    )
    for server in started[1:]:
        server.decisions = folder / server.name  # type: ignore[attr-defined]
    return tuple(started)


def body(prompt: Any, name: str, max_tokens: int = 2, **more: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {**asked, "return_token_ids": True, "request_id": name, **more}


def some_prompts(count: int, seed: int) -> list[list[int]]:
    """In bursts of ten alike: those of one are made of the same three tokens."""
    rng = np.random.default_rng(seed)
    tokens = np.repeat(rng.integers(10, VOCABULARY, (-(-count // 10), 3)), 10, axis=0)[:count]
    return [rng.choice(few, rng.integers(4, 12)).tolist() for few in tokens]


def decisions_of(server: Server) -> list[dict[str, Any]]:
    text: str = server.decisions.read_text()  # type: ignore[attr-defined]
    return [json.loads(line) for line in text.splitlines()]


def gated(
    server: Server,
    bodies: list[dict[str, Any]],
    count: int,
    meanwhile: Callable[[float], None] | None = None,
    first: int | None = None,
) -> tuple[list[dict[str, Any]], list[str], list[dict[str, Any]]]:
    """Send while the server takes nobody in, then let it run: answers, ids as they ended, and the selections.

    `first` is how many the first selection must have waiting in its class; all, if there is one class.

    vLLM tells no waiting requests while it is paused, so whether all had come is seen afterwards; if not, they are sent
    again and get more time. `meanwhile` is called with that time too.
    """
    for wait_s in (2, 8, 30, 90):
        listener, before = Listener(server.events), len(decisions_of(server))
        server.post("/pause?mode=keep", {})
        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = [pool.submit(server.post, "/v1/completions", one) for one in bodies]
            time.sleep(wait_s)
            if meanwhile is not None:
                meanwhile(wait_s)
            server.post("/resume", {})
            got = [answer.result() for answer in answers]
        ended, made = list(listener.wait(count)), decisions_of(server)[before:]
        if not made or made[0]["queued"] == (first or count):
            return got, ended, made
    raise AssertionError(f"{count} requests never waited at once")


def places(ended: Iterable[str]) -> list[int]:
    """What was asked in one call goes by its place there."""
    return [int(re.findall(r"-(\d+)-", name)[-1]) for name in ended]


def tokens_of(answer: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]


def replayed(loads: list[np.ndarray]) -> tuple[list[int], int]:
    """The same strategy offline, on requests in order of arrival: the order, and the most any was passed over."""
    config = SchedulerConfig(strategy="greedy_variance", max_skips=SKIPS, max_batch_size=PLACES)
    queue = Scheduler(config, config.make(), np.array(loads), np.random.default_rng(0))
    for number in range(len(loads)):
        queue.push(number, 0.0)
    order: list[int] = []
    worst = 0
    while len(queue):
        batch = queue.next_batch(np.zeros(loads[0].shape))
        order += batch.items
        worst = max(worst, *batch.skipped)
    return order, worst


@pytest.mark.long
def test_a_thousand_queued_requests(servers: tuple[Server, ...], table_file: Path) -> None:
    """The order is the strategy's, exactly; nobody starves; every token is plain vLLM's."""
    plain, ordered, _ = servers
    prompts = some_prompts(QUEUED, seed=1)
    (answer,), ended, made = gated(ordered, [body(prompts, "thousand")], QUEUED)
    table = TokenTable.load(table_file)
    loads = [table.predict(PredictRequest(token_ids=np.array(prompt), num_tokens=1)) for prompt in prompts]
    expected, worst = replayed(loads)
    order = places(ended)
    assert sorted(order) == list(range(QUEUED)), "every one ended, once"
    assert order == expected
    assert max(max(line["skipped"]) for line in made) == worst == SKIPS, "the cap was reached, and held"

    def unevenness(numbers: list[int]) -> float:
        batches = [numbers[at : at + PLACES] for at in range(0, QUEUED, PLACES)]
        return float(np.mean([np.sum([loads[n] for n in batch], axis=0).std() for batch in batches]))

    assert unevenness(order) < 0.85 * unevenness(list(range(QUEUED))), "flatter batches than in order of arrival"
    reference = plain.post("/v1/completions", body(prompts, "thousand"))
    assert tokens_of(answer) == tokens_of(reference)


@pytest.mark.long
def test_requests_whose_client_goes_away_while_they_wait(servers: tuple[Server, ...]) -> None:
    plain, ordered, _ = servers
    kept = some_prompts(60, seed=2)
    gone = body(some_prompts(60, seed=3), "gone")

    def come_and_go(wait_s: float) -> None:
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(ordered.url).netloc)
        connection.request("POST", "/v1/completions", json.dumps(gone), {"content-type": "application/json"})
        time.sleep(wait_s)
        connection.close()
        time.sleep(wait_s)

    # None of those that left ends: only the others' events come.
    (answer,), ended, made = gated(ordered, [body(kept, "kept")], 60, come_and_go)
    assert all("kept" in name for name in ended)
    assert not any("gone" in name for line in made for name in line["window"])
    reference = plain.post("/v1/completions", body(kept, "kept"))
    assert tokens_of(answer) == tokens_of(reference)


@pytest.mark.long
def test_without_a_known_load_the_order_is_vllms(servers: tuple[Server, ...]) -> None:
    """Said once; nothing is selected."""
    _, _, server = servers
    _, ended, made = gated(server, [body(some_prompts(24, seed=4), "unknown")], 24)
    assert made == []
    assert ended == sorted(ended), "all of one priority and arrival: by id"
    assert server.log.read_text().count("no waiting request has a known load") == 1


@pytest.mark.long
def test_priorities_and_loads_from_footprints(servers: tuple[Server, ...]) -> None:
    """Three classes of 16: a lower never goes before a higher, and within one the strategy chooses."""
    _, _, server = servers
    rng = np.random.default_rng(5)
    counts = rng.integers(0, 9, (48, LAYERS, NUM_EXPERTS)).astype(np.uint32)
    bodies = []
    for number, prompt in enumerate(some_prompts(48, seed=6)):
        wire = encode_footprint(WireFootprint(counts[number], tuple(range(LAYERS)), 10))
        bodies.append(body(prompt, f"r{number}r", priority=number % 3, kv_transfer_params={KEY: wire}))
    _, ended, made = gated(server, bodies, 48, first=16)
    numbers = [int(re.findall(r"r(\d+)r", name)[0]) for name in ended]
    assert sorted(numbers) == list(range(48))
    assert [number % 3 for number in numbers] == [0] * 16 + [1] * 16 + [2] * 16
    expected = []
    for line in made:
        if len(line["window"]) == 16:  # a class as it came
            came = [int(re.findall(r"r(\d+)r", name)[0]) for name in line["window"]]
            expected += [came[at] for at in replayed([counts[number] / 10 for number in came])[0]]
    assert numbers == expected


@pytest.mark.long
def test_preempted_requests_finish_with_the_same_tokens(servers: tuple[Server, ...]) -> None:
    plain, _, server = servers
    prompts = some_prompts(12, seed=7)
    wire = encode_footprint(WireFootprint(np.ones((LAYERS, NUM_EXPERTS), np.uint32), tuple(range(LAYERS)), 8))
    asked = body(prompts, "tight", max_tokens=60)
    answer = server.post("/v1/completions", {**asked, "kv_transfer_params": {KEY: wire}})
    assert server.metrics()["vllm:num_preemptions_total"] > 0
    assert tokens_of(answer) == tokens_of(plain.post("/v1/completions", asked))


@pytest.mark.long
def test_the_log_counts(fleet: Fleet, servers: tuple[Server, ...]) -> None:
    _, ordered, server = servers
    counters: dict[str, str] = {}
    until = time.monotonic() + 120
    while int(counters.get("selections", 0)) < QUEUED / PLACES and time.monotonic() < until:
        ordered.complete("once more", max_tokens=1)
        time.sleep(0.2)
        last = ordered.log.read_text().rpartition("coterie: waiting requests since the start: ")[2].splitlines()[0]
        counters = dict(re.findall(r"(\w+) (\d+)(?:,|$)", last))
    assert int(counters["selections"]) >= QUEUED / PLACES
    assert int(counters["handed_out"]) >= QUEUED
    assert int(counters["moved"]) > QUEUED / 2
    assert (int(counters["failures"]), int(counters["worst_skips"])) == (0, SKIPS)
    for one in (ordered, server):
        assert "greedy_variance orders the waiting requests" in one.log.read_text()
        assert "serving goes on" not in one.log.read_text()
    fleet.stop("ordered", "priority")


# The queues by themselves, with vLLM's requests.


@pytest.fixture(scope="module")
def imported() -> None:
    """vLLM in this process: what it imports warns, and warnings are errors here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import coterie.engines.vllm.scheduler
        import coterie.engines.vllm.waiting  # noqa: F401


def request(number: int, priority: int = 0, arrival: float | None = None) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request(
        f"r{number:04}",
        [number + 10, 3, 5],
        SamplingParams(max_tokens=2),
        None,
        arrival_time=float(number if arrival is None else arrival),
        priority=priority,
    )


def state(policy: str) -> Any:
    """What the queues read off a scheduler."""
    from vllm.v1.core.sched.request_queue import SchedulingPolicy

    model = SimpleNamespace(get_total_num_hidden_layers=lambda: LAYERS, get_num_experts=lambda: NUM_EXPERTS)
    return SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=model),
        running=[],
        max_num_active_reqs=4,
        num_waiting_for_streaming_input=0,
        finished_recving_kv_req_ids=set(),
        policy=SchedulingPolicy(policy),
        waiting=deque(),
        kv_holding_waiting=deque(),
    )


def queues(scheduler: Any, **how: Any) -> tuple[Any, Any, Any]:
    from coterie.engines.vllm.waiting import chosen_queues

    settings = OrderingSettings(**{"strategy": "greedy_variance", **how})
    chooser, by_name = chosen_queues(scheduler, settings, lambda _: None)
    return chooser, by_name["waiting"], by_name["kv_holding_waiting"]


operations = st.lists(st.tuples(st.sampled_from(["add", "pop", "prepend", "skip", "remove"]), st.integers(0, 30)))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.usefixtures("imported")
def test_nothing_known_is_vllms_own_queue(policy: str) -> None:
    from vllm.v1.core.sched.request_queue import create_request_queue

    @given(operations)
    @settings(max_examples=40)
    def check(steps: list[tuple[str, int]]) -> None:
        scheduler = state(policy)
        _, ours, _ = queues(scheduler)
        theirs = create_request_queue(scheduler.policy)
        taken: list[Any] = []
        for number, (what, at) in enumerate(steps):
            if what == "add":
                one = request(number, at % 3)
                ours.add_request(one)
                theirs.add_request(one)
            elif what == "pop" and theirs:
                assert ours.peek_request() is theirs.peek_request()
                taken.append(theirs.pop_request())
                assert ours.pop_request() is taken[-1]
            elif what == "prepend" and taken:
                one = taken.pop()
                ours.prepend_request(one)
                theirs.prepend_request(one)
            elif what == "skip" and len(taken) > 1:
                some = deque([taken.pop(), taken.pop()])
                ours.prepend_requests(some)
                theirs.prepend_requests(some)
            elif what == "remove" and theirs:
                one = list(theirs)[at % len(theirs)]
                ours.remove_requests([one, request(-1)])
                theirs.remove_requests([one])
            assert (list(ours), len(ours), bool(ours)) == (list(theirs), len(theirs), bool(theirs))

    check()


@pytest.mark.usefixtures("imported")
def test_what_cannot_start_yet_takes_no_part(table_file: Path) -> None:
    """A queue of requests whose KV is on its way: those that have it are chosen from, the rest comes after."""
    from vllm.v1.request import RequestStatus

    scheduler = state("fcfs")
    chooser, _, holding = queues(scheduler, loads=str(table_file), batch_size=4)
    requests = [request(number) for number in range(12)]
    for one in requests:
        one.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    holding.prepend_requests(reversed(requests))
    arrived = {requests[n].request_id for n in (2, 5, 6, 7, 9)}
    scheduler.finished_recving_kv_req_ids |= arrived
    out = [holding.pop_request() for _ in range(12)]
    assert {one.request_id for one in out[:5]} == arrived
    assert out[0] is requests[2]
    assert out[5:] == [one for one in requests if one.request_id not in arrived]
    assert chooser.counters.selections == 2


@pytest.mark.usefixtures("imported")
def test_preempted_requests_go_first(table_file: Path) -> None:
    for policy in ("fcfs", "priority"):
        chooser, waiting, _ = queues(state(policy), loads=str(table_file))
        for number in range(40):
            waiting.add_request(request(number))
        stopped = [waiting.pop_request() for _ in range(3)]
        for one in stopped:
            one.num_preemptions = 1
        for one in reversed(stopped):
            waiting.prepend_request(one)
        if policy == "priority":
            stopped.sort(key=lambda one: one.arrival_time)
        assert [waiting.pop_request() for _ in range(3)] == stopped
        assert chooser.counters.selections == 1, "the selection goes on"


@pytest.mark.usefixtures("imported")
def test_remaining_tokens_are_the_load_of_a_prefill(table_file: Path) -> None:
    chooser, _, _ = queues(state("fcfs"), loads=str(table_file), phase="prefill")
    one = request(1)
    assert chooser.view.tokens(one) == 3
    one.num_computed_tokens = 2
    assert chooser.view.tokens(one) == 1


@pytest.mark.usefixtures("imported")
def test_a_short_queue_is_held_back_and_counted() -> None:
    """vLLM asks a queue whether it is empty to start requests, and how long it is to know whether any are left."""
    from coterie.engines.vllm import scheduler as module

    class Base:
        def schedule(self) -> bool:
            return bool(waiting)

    class Mixed(module.ExpertAwareMixin, Base):
        def __init__(self) -> None:
            self._queues, self._trigger = (waiting,), BatchTrigger(3, 3600.0)

    _, waiting, _ = queues(state("fcfs"), min_batch_trigger=3)
    one = Mixed()
    for number, starts in enumerate((False, False, True)):
        waiting.add_request(request(number))
        assert one.schedule() is starts
        assert len(waiting) == number + 1
    waiting.remove_requests([waiting.peek_request()])
    stopped = request(9)
    stopped.num_preemptions = 1
    assert one.schedule() is False
    waiting.prepend_request(stopped)
    waiting.remove_requests([next(one for one in waiting if one is not stopped)])
    assert one.schedule() is True, "a preempted request is not held back"


@pytest.mark.usefixtures("imported")
def test_settings_of_the_scheduler() -> None:
    from coterie.engines.vllm.scheduler import read_settings

    found = read_settings({"coterie": {"scheduler": {"strategy": "lpt", "window_size": 16}}, "other": 1})
    assert (found.strategy, found.window_size, found.max_skips, found.min_batch_trigger) == ("lpt", 16, 64, 1)
    for config, words in (
        ({"coterie": {"scheduler": {"strategy": "lpt", "windows": 1}}}, "settings: strategy, options, window_size"),
        ({"coterie": {"schedule": {}}}, "unknown 'schedule'; known: 'scheduler'"),
        ({"coterie": 3}, "expected an object"),
        ({}, "strategy"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_settings(config)


@pytest.mark.usefixtures("imported")
def test_a_version_without_these_queues_keeps_its_own(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    from coterie.engines.vllm import interfaces
    from coterie.engines.vllm import scheduler as module

    class Base:
        def __init__(self) -> None:
            self.waiting: deque[Any] = deque()
            self.kv_holding_waiting = self.waiting

        def schedule(self, throttle_prefills: bool = False) -> bool:
            return throttle_prefills

        def shutdown(self) -> None:
            self.ended = True

    class Mixed(module.ExpertAwareMixin, Base):
        pass

    need = "v1.core.sched.scheduler:Scheduler.renamed_waiting"
    monkeypatch.setitem(interfaces.NEEDS, "scheduler", (*interfaces.NEEDS["scheduler"], need))
    monkeypatch.setattr(interfaces.logger.parent, "propagate", True)
    interfaces.fits.cache_clear()
    one = Mixed()
    interfaces.fits.cache_clear()
    assert type(one.waiting) is type(one.kv_holding_waiting) is deque
    assert one.schedule(True) is True
    one.shutdown()
    assert one.ended
    assert f"lacks {need}, which scheduler needs: requests wait in vLLM's own order" in caplog.text
    assert "still works: connector" in caplog.text
