"""SGLang's own expert recorder, driven over HTTP: its dumps become a load table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError, UnavailableError
from coterie.traces import LoadTable
from sglang_peer import Peer, Running
from sglang_recordings import record

EXPERTS, LAYERS = 5, 3
IDENTITY = np.tile(np.arange(EXPERTS), (LAYERS, 1))


def test_the_recorder_is_never_touched_where_it_is_not_configured(tmp_path: Path) -> None:
    """Starting one that is not there raises inside the scheduler, up to some version."""
    for info in ({}, {"expert_distribution_recorder_mode": ""}):
        with Running(Peer(info=info)) as peer:
            with pytest.raises(ConfigError, match="start it with --expert-distribution-recorder-mode"):
                record(peer, tmp_path / "t", mode="recorder", dump_dir=tmp_path)
            with pytest.raises(ConfigError, match="records nothing: start it with --expert-distribution-recorder-mode"):
                record(peer, tmp_path / "t", prompts=(), duration_s=1.0)
        assert set(peer.calls) == {"/server_info"}


def configured(mode: str, **more: Any) -> Peer:
    return Peer(info={"expert_distribution_recorder_mode": mode, **more.pop("info", {})}, **more)


def test_a_dump_folder_that_is_not_here(tmp_path: Path) -> None:
    with Running(configured("stat")) as peer, pytest.raises(ConfigError, match="is no folder here"):
        record(peer, tmp_path / "t", mode="recorder", dump_dir=tmp_path / "nowhere")
    assert set(peer.calls) == {"/server_info"}


def test_a_recorder_that_does_not_start(tmp_path: Path) -> None:
    peer = configured("stat", recorder_status=400)
    with Running(peer), pytest.raises(UnavailableError, match="does not start its recorder: HTTP 400"):
        record(peer, tmp_path / "t", mode="recorder", dump_dir=tmp_path)


def test_no_dump_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.engines.sglang.recording.DUMP_WAIT_S", 0.3)
    with Running(configured("stat")) as peer, pytest.raises(UnavailableError, match="no new dump appeared"):
        record(peer, tmp_path / "t", mode="recorder", dump_dir=tmp_path)
    assert not (tmp_path / "t").exists()


def test_an_interrupted_recording_stops_the_recorder(tmp_path: Path) -> None:
    def interrupt(what: str, done: int, _: int) -> None:
        if "Recording" in what and done == 2:
            raise KeyboardInterrupt

    with Running(configured("stat")) as peer, pytest.raises(KeyboardInterrupt):
        record(peer, tmp_path / "t", mode="recorder", dump_dir=tmp_path, concurrency=1, report=interrupt)
    controls = [call for call in peer.calls if "expert_distribution" in call]
    assert controls == ["/start_expert_distribution_record", "/stop_expert_distribution_record"]


def save(folder: Path, name: str, dump: Any) -> None:
    import torch

    torch.save(dump, folder / f"expert_distribution_recorder_{name}.pt")


def pass_dump(rank: int, times: int) -> dict[str, Any]:
    import torch

    count = torch.full((LAYERS, EXPERTS), times, dtype=torch.int64)
    records = [{"forward_pass_id": n, "rank": rank, "global_physical_count": count} for n in range(2)]
    return {"records": records, "last_physical_to_logical_map": torch.from_numpy(IDENTITY)}


@pytest.mark.torch
def test_listening_to_a_server(tmp_path: Path) -> None:
    """No prompts: the recorder is started, time passes, its dump is read; an older dump in the folder is not."""
    pytest.importorskip("torch")
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    save(dumps, "1.5_0", pass_dump(0, 9))
    peer = configured("per_pass", on_dump=lambda: save(dumps, "2.5_0", pass_dump(0, 4)))
    seconds: list[str] = []
    with Running(peer):
        found = record(
            peer,
            tmp_path / "t",
            prompts=(),
            duration_s=0.3,
            dump_dir=dumps,
            model="mine",
            report=lambda what, *_: seconds.append(what),
        )
    assert isinstance(found.trace, LoadTable)
    assert peer.bodies == []
    assert [c.split("_")[0] for c in peer.calls[1:]] == ["/start", "/stop", "/dump"]
    table = LoadTable.open(tmp_path / "t")
    assert table.model == "mine"
    assert (table.counts == 4).all()
    assert "Listening, seconds" in seconds


@pytest.mark.torch
def test_coarser_modes_give_a_load_table(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    counts = torch.arange(2 * LAYERS * EXPERTS).reshape(2, LAYERS, EXPERTS)
    peer = configured("stat", on_dump=lambda: save(tmp_path, "1700000000.25", {"rank": 0, "logical_count": counts}))
    with Running(peer):
        found = record(peer, tmp_path / "t", mode="recorder", dump_dir=tmp_path)
    assert isinstance(found.trace, LoadTable)
    np.testing.assert_array_equal(LoadTable.open(tmp_path / "t").counts, counts.numpy())


@pytest.mark.torch
def test_per_pass_sums_the_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch")

    def dump() -> None:
        for rank in range(3):
            save(tmp_path, f"2.5_{rank}", pass_dump(rank, rank + 1))

    save(tmp_path, "1.5_0", pass_dump(0, 40))
    with Running(configured("per_pass", info={"tp_size": 3}, on_dump=dump)) as peer:
        found = record(peer, tmp_path / "t", mode="recorder", dump_dir=tmp_path)
    assert isinstance(found.trace, LoadTable)
    assert found.trace.counts.shape == (2, LAYERS, EXPERTS)
    assert (found.trace.counts == 1 + 2 + 3).all()
