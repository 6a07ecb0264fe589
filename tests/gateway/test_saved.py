"""State over a restart: what was saved is read, what is damaged is kept and told."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coterie.errors import ConfigError, TraceError
from coterie.gateway import saved
from coterie.gateway.config import WorkerEntry
from coterie.gateway.fleet.spec import RouterSpec
from coterie.gateway.saved import SavedState, load_state, lock_state, save_state

STATE = SavedState(
    [
        WorkerEntry(id="p", url="http://127.0.0.1:1", role="prefill", kv_events="tcp://h:1", secure_events=True),
        WorkerEntry(id="d0", url="http://h:2", role="decode", places=64, speed=0.5, data_parallel_rank=3),
    ],
    {"decode": RouterSpec(router="locality_band:band=0.05", fit="fits/a b.safetensors", seed=7)},
    ["gone"],
)


@given(
    st.lists(
        st.builds(
            WorkerEntry,
            id=st.text("ab- /", min_size=1, max_size=5),
            url=st.just("http://h:1"),
            role=st.sampled_from(["prefill", "decode", "both"]),
            places=st.integers(1, 2**20),
            speed=st.floats(0, 1e300, exclude_min=True),
            data_parallel_rank=st.none() | st.integers(0, 99),
        ),
        max_size=4,
        unique_by=lambda worker: worker.id,
    ),
    st.dictionaries(st.text(max_size=5), st.builds(RouterSpec, router=st.text(), seed=st.integers(0, 9))),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_was_saved_is_read(tmp_path: Path, workers: list[WorkerEntry], routers: dict[str, RouterSpec]) -> None:
    state = SavedState(workers, routers)
    save_state(tmp_path / "state.json", state)
    assert load_state(tmp_path / "state.json") == (state, None)
    assert [one.name for one in tmp_path.iterdir()] == ["state.json"]


def test_no_file_is_no_problem(tmp_path: Path) -> None:
    assert load_state(tmp_path / "state.json") == (None, None)


def test_a_loop_of_links_is_refused_in_one_line(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.symlink_to(second)
    second.symlink_to(first)
    for path in (first, first / "state.json"):
        with pytest.raises(ConfigError, match=f"^{path}: state must be a file, not a loop of symbolic links$"):
            lock_state(path)


def whole() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        '{"format":"coterie-gateway-state","version":1,"workers":[{"id":"a","url":"http://h"}],"routers":{}}'
    )
    return found


DAMAGED = {
    "empty": b"",
    "cut": b'{"format": "coterie-gateway-state", "ver',
    "bytes": bytes(range(256)),
    "deep": b"[" * 100_000,
    "list": b"[]",
    "another file": b"{}",
    "version": json.dumps(whole() | {"version": 2}).encode(),
    "huge version": json.dumps(whole() | {"version": 10**40}).encode(),
    "unknown field": json.dumps(whole() | {"keys": []}).encode(),
    "places": json.dumps(whole() | {"workers": [{"id": "a", "url": "http://u", "places": 0}]}).encode(),
    "speed": json.dumps(whole() | {"workers": [{"id": "a", "url": "http://u", "speed": -1}]}).encode(),
    "rank": json.dumps(whole() | {"workers": [{"id": "a", "url": "http://u", "placement_rank": -1}]}).encode(),
    "no url": json.dumps(whole() | {"workers": [{"id": "a"}]}).encode(),
    "role": json.dumps(whole() | {"workers": [{"id": "a", "url": "http://u", "role": "boss"}]}).encode(),
    "twice": json.dumps(whole() | {"workers": [{"id": "a", "url": "http://u"}] * 2}).encode(),
    "router": json.dumps(whole() | {"routers": {"decode": {"router": 3}}}).encode(),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_file_is_set_aside_and_told(tmp_path: Path, what: str) -> None:
    file = tmp_path / "state.json"
    for number in (1, 2):
        file.write_bytes(DAMAGED[what])
        state, problem = load_state(file)
        assert state is None
        assert problem is not None
        assert f"state.json.damaged-{number}" in problem
        assert "\n" not in problem
        assert not file.exists()
    assert (tmp_path / "state.json.damaged-1").read_bytes() == DAMAGED[what]
    assert (tmp_path / "state.json.damaged-2").read_bytes() == DAMAGED[what]
    save_state(file, STATE)
    assert load_state(file) == (STATE, None)


@pytest.mark.parametrize("length", range(0, 60, 7))
def test_every_cut_is_noticed(tmp_path: Path, length: int) -> None:
    file = tmp_path / "state.json"
    save_state(file, STATE)
    file.write_bytes(file.read_bytes()[:length])
    assert load_state(file).problem is not None


def test_too_large_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "MOST_BYTES", 100)
    save_state(tmp_path / "state.json", STATE)
    assert "100 bytes" in (load_state(tmp_path / "state.json").problem or "")


def test_a_crash_leaves_the_old_file_or_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops at every call that touches the disk."""
    file = tmp_path / "state.json"
    save_state(file, STATE)
    for target, name in ((os, "fsync"), (Path, "replace")):
        with monkeypatch.context() as patch:

            def fail(*_: Any) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr(target, name, fail)
            with pytest.raises(ConfigError, match="No space left"):
                save_state(file, SavedState())
        assert load_state(file) == (STATE, None)
        assert [one.name for one in tmp_path.iterdir()] == ["state.json"], "nothing half written stays"


def test_what_cannot_be_set_aside_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "state.json"
    file.write_bytes(b"damaged")
    monkeypatch.setattr(saved, "MOST_ASIDE", 1)
    (tmp_path / "state.json.damaged-1").write_bytes(b"older")
    with pytest.raises(ConfigError, match="damaged"):
        load_state(file)
    assert file.read_bytes() == b"damaged"
    with pytest.raises(ConfigError, match="Is a directory"):
        load_state(tmp_path)
    with pytest.raises(ConfigError, match="cannot be written"):
        save_state(tmp_path / "nowhere" / "state.json", STATE)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="a pipe"):
        load_state(tmp_path / "pipe")
