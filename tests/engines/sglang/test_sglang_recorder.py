"""SGLang's own expert recorder, driven over HTTP: its dumps become a trace or a load table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError, UnavailableError
from coterie.traces import ActivationTrace, LoadTable
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


def token_dump(first_token: int, length: int, rank: int = 0) -> dict[str, Any]:
    """One prompt, one pass: layer 0 dense, token t of layer l chose expert (t + l) and the next."""
    import torch

    slots = np.full((LAYERS, length, 8), -1)
    for layer in (1, 2):
        for token in range(length):
            slots[layer, token, :2] = [(first_token + token + layer + j) % EXPERTS for j in range(2)]
    record = {
        "forward_pass_id": 0,
        "rank": rank,
        "gatherer_key": "primary",
        "forward_mode": 1,
        "extend_seq_lens": [length],
        "input_ids": list(range(first_token, first_token + length)),
        "positions": list(range(length)),
        "topk_ids_of_layer": torch.from_numpy(slots),
        "global_physical_count": torch.zeros(LAYERS, EXPERTS, dtype=torch.int64),
    }
    return {"records": [record], "last_physical_to_logical_map": torch.from_numpy(IDENTITY)}


@pytest.mark.torch
def test_listening_to_a_server_per_token(tmp_path: Path) -> None:
    """No prompts: the recorder is started, time passes, its dump is read; an older dump in the folder is not."""
    pytest.importorskip("torch")
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    save(dumps, "1.5_0", token_dump(70, 9))
    peer = configured("per_token", on_dump=lambda: save(dumps, "2.5_0", token_dump(10, 4)))
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
    assert isinstance(found.trace, ActivationTrace)
    assert peer.bodies == []
    assert [c.split("_")[0] for c in peer.calls[1:]] == ["/start", "/stop", "/dump"]
    trace = ActivationTrace.open(tmp_path / "t")
    assert trace.meta.model == "mine"
    expected = [[[(token + layer) % 5, (token + layer + 1) % 5] for layer in (1, 2)] for token in range(10, 14)]
    assert trace.request(0).expert_ids.tolist() == expected
    assert "Listening, seconds" in seconds


@pytest.mark.torch
def test_ranks_that_share_their_tokens_are_read_once(tmp_path: Path) -> None:
    pytest.importorskip("torch")

    def dump() -> None:
        for rank in range(2):
            save(tmp_path, f"2.5_{rank}", token_dump(10, 4, rank))

    with Running(configured("per_token", info={"tp_size": 2}, on_dump=dump)) as peer:
        found = record(peer, tmp_path / "t", mode="recorder", dump_dir=tmp_path)
    assert isinstance(found.trace, ActivationTrace)
    assert (found.trace.num_requests, found.trace.num_tokens) == (1, 4)
    assert (found.tally.done, len(peer.bodies)) == (9, 9)
    assert "return_routed_experts" not in peer.bodies[0]


@pytest.mark.torch
def test_data_parallel_attention_adds_the_ranks_up(tmp_path: Path) -> None:
    """Four ranks in two groups: 0 and 1 share tokens, 2 and 3 share others."""
    pytest.importorskip("torch")

    def dump() -> None:
        for rank in range(4):
            save(tmp_path, f"2.5_{rank}", token_dump(*((10, 4) if rank < 2 else (50, 3)), rank))

    info = {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}
    with Running(configured("per_token", info=info, on_dump=dump)) as peer:
        found = record(peer, tmp_path / "t", mode="recorder", dump_dir=tmp_path)
    trace = found.trace
    assert isinstance(trace, ActivationTrace)
    assert [trace.request(n).token_ids.tolist() for n in range(2)] == [[10, 11, 12, 13], [50, 51, 52]]  # type: ignore[union-attr]
    assert trace.requests.prompt_tokens.tolist() == [4, 3]
    ActivationTrace.open(tmp_path / "t").validate()


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
    torch = pytest.importorskip("torch")

    def one(rank: int) -> dict[str, Any]:
        count = torch.full((LAYERS, EXPERTS), rank + 1, dtype=torch.int64)
        records = [{"forward_pass_id": n, "rank": rank, "global_physical_count": count} for n in range(2)]
        return {"records": records, "last_physical_to_logical_map": torch.from_numpy(IDENTITY)}

    def dump() -> None:
        for rank in range(3):
            save(tmp_path, f"2.5_{rank}", one(rank))

    save(tmp_path, "1.5_0", one(40))
    with Running(configured("per_pass", info={"tp_size": 3}, on_dump=dump)) as peer:
        found = record(peer, tmp_path / "t", mode="recorder", dump_dir=tmp_path)
    assert isinstance(found.trace, LoadTable)
    assert found.trace.counts.shape == (2, LAYERS, EXPERTS)
    assert (found.trace.counts == 1 + 2 + 3).all()
