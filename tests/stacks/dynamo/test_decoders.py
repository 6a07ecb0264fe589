"""Decode workers of a Dynamo component: which may be chosen, and what is read from a request."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError, UnavailableError
from coterie.gateway.config import GatewayConfig
from coterie.gateway.embedded import tiny_fit_path
from coterie.gateway.fleet.spec import RouterSpec
from coterie.gateway.watching.metrics import Metrics
from coterie.stacks.dynamo import __main__ as command
from coterie.stacks.dynamo.decoders import MOST_ERRORS, PARAMS, REST_S, Decoders
from coterie.wire.footprints import KEY, WireFootprint, attach_footprint

FIT = GatewayConfig(decode=RouterSpec("latency_aware", fit=str(tiny_fit_path()), model="gpt-oss-20b"))
COUNTS = np.zeros((8, 32), np.uint8)
COUNTS[:, :4] = 20


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def made(config: GatewayConfig = GatewayConfig(), *names: str) -> tuple[Decoders, Clock]:  # noqa: B008 (frozen)
    clock = Clock()
    decoders = Decoders(config, Metrics(), clock)
    decoders.listed(dict.fromkeys(names, 16))
    return decoders, clock


def request(params: dict[str, Any] | None = None, tokens: int = 20) -> dict[str, Any]:
    result = None if params is None else {"disaggregated_params": {PARAMS: params, "other": 1}}
    return {"token_ids": list(range(tokens)), "prefill_result": result, "stop_conditions": {"max_tokens": 3}}


def with_footprint(tokens: int = 20) -> dict[str, Any]:
    params: dict[str, Any] = {"remote_host": "h"}
    attach_footprint(params, WireFootprint(COUNTS, tuple(range(8)), tokens))
    return params


def test_a_prefills_footprint_is_routed_by_and_not_passed_on() -> None:
    decoders, _ = made(FIT, "1", "2")
    whole = request(with_footprint())
    known = decoders.read(whole)
    assert known.counts is not None
    assert np.array_equal(known.counts, COUNTS)
    assert known.prefilled
    assert known.passed["prefill_result"]["disaggregated_params"] == {PARAMS: {"remote_host": "h"}, "other": 1}
    assert known.passed["stop_conditions"] == {"max_tokens": 3}
    assert KEY in whole["prefill_result"]["disaggregated_params"][PARAMS], "the frontend's request is not changed"


@pytest.mark.parametrize("params", [None, {}, {"remote_host": "h"}])
def test_without_a_footprint_it_is_predicted(params: dict[str, Any] | None) -> None:
    decoders, _ = made(FIT, "1")
    plain = request(params)
    known = decoders.read(plain)
    assert known.counts is not None
    assert known.counts.shape == COUNTS.shape
    assert known.passed == plain
    assert known.prefilled == bool(params)


@pytest.mark.parametrize("value", ["", "AAAA", 5, with_footprint(tokens=1)[KEY]])
def test_a_damaged_footprint_is_counted_and_removed(value: object) -> None:
    decoders, _ = made(FIT, "1")
    known = decoders.read(request({"remote_host": "h", KEY: value}))
    assert known.passed["prefill_result"]["disaggregated_params"][PARAMS] == {"remote_host": "h"}
    assert decoders.metrics.footprints.values()["damaged",] == 1
    assert decoders.choose("r", known, None).fallback is None


def test_the_worker_that_holds_the_prompt_is_told_to_the_router() -> None:
    decoders, _ = made(GatewayConfig(), "1", "2")
    known = decoders.read(request(tokens=64))
    decoders.choose("r", known, {"1": 64, "gone": 64})
    assert decoders.metrics.cached_tokens.values()["decode", "expected"] == 63, "the last token is computed anyway"


def test_a_lost_instance_leaves_at_once_and_returns_when_it_is_listed_after_its_rest() -> None:
    decoders, clock = made(GatewayConfig(), "1", "2")
    choice = decoders.choose("r", decoders.read(request()), None)
    lost, other = choice.worker_id, {"1": "2", "2": "1"}[choice.worker_id]
    decoders.lost(lost, "connect")
    assert set(decoders.keeper.members) == {other}
    assert decoders.choose("r", decoders.read(request()), None, {lost}).worker_id == other
    decoders.listed({"1": 16, "2": 16})
    assert set(decoders.keeper.members) == {other}, "Dynamo still lists an instance that is dead"
    clock.now += REST_S
    decoders.listed({"1": 16, "2": 16})
    assert set(decoders.keeper.members) == {"1", "2"}
    assert decoders.keeper.finish("r")
    assert not decoders.keeper.fleet.in_flight.any()


def test_an_instance_that_left_the_list_may_return_at_once() -> None:
    decoders, _ = made(GatewayConfig(), "1", "2")
    decoders.lost("1", "incomplete")
    decoders.listed({"2": 16})
    decoders.listed({"1": 16, "2": 16})
    assert set(decoders.keeper.members) == {"1", "2"}


def test_an_instance_that_answers_with_errors_alone_rests() -> None:
    decoders, _ = made(GatewayConfig(), "1", "2")
    for _ in range(5):
        decoders.failed("1")
        decoders.failed("1")
        decoders.answered("1")
    assert set(decoders.keeper.members) == {"1", "2"}
    for _ in range(MOST_ERRORS):
        decoders.failed("1")
    assert set(decoders.keeper.members) == {"2"}


def test_without_any_other_instance_the_lost_ones_are_tried() -> None:
    decoders, _ = made(GatewayConfig(), "1")
    decoders.lost("1", "connect")
    with pytest.raises(UnavailableError):
        decoders.choose("r", decoders.read(request()), None)
    decoders.listed({"1": 4})
    assert decoders.choose("r", decoders.read(request()), None).worker_id == "1"
    assert decoders.keeper.members["1"].places == 4


@given(st.lists(st.tuples(st.sampled_from(["listed", "lost", "choose", "finish"]), st.integers(0, 31)), max_size=40))
def test_load_counts_follow_the_requests(events: list[tuple[str, int]]) -> None:
    decoders, clock = made(GatewayConfig(), "0")
    known = decoders.read(request())
    for what, number in events:
        clock.now += 1
        if what == "listed":
            decoders.listed({str(bit): 16 for bit in range(5) if number >> bit & 1})
        elif what == "lost":
            decoders.lost(str(number % 5), "connect")
        elif what == "choose" and decoders.keeper.members:
            assert decoders.choose(str(number), known, None).worker_id in decoders.keeper.members
        elif what == "finish":
            decoders.keeper.finish(str(number))
        assert decoders.keeper.fleet.running.sum() == len(decoders.keeper.requests)
    for key in list(decoders.keeper.requests):
        decoders.keeper.finish(key)
    assert not decoders.keeper.fleet.running.any()


def test_a_config_with_workers_is_refused(tmp_path: Any) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("workers: [{id: a, url: 'http://h:1'}]")
    with pytest.raises(ConfigError, match="workers"):
        command.read_settings(path)
    assert command.read_settings(None) == GatewayConfig()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--decoders", "backend"), "--decoders=backend must be NAMESPACE.COMPONENT.ENDPOINT"),
        (("--endpoint", "a..b"), "--endpoint=a..b must be"),
        (("--endpoint", "decoders.coterie.generate"), "two namespaces"),
        (("--config", "/nowhere"), "/nowhere"),
        ((), "coterie[dynamo]"),
    ],
)
def test_what_cannot_be_started_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    def none(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(command, "version", none)
    monkeypatch.setattr("sys.argv", ["dynamo", *arguments])
    with pytest.raises(SystemExit) as ended:
        command.main()
    printed = capsys.readouterr().err
    assert (ended.value.code, printed.count("\n")) == (2, 1)
    assert said in printed


def test_an_untested_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "version", lambda _: "9.9")
    with pytest.warns(UserWarning, match=r"9\.9"):
        command.check_installed()
    monkeypatch.setattr(command, "version", lambda _: command.TESTED)
    command.check_installed()
