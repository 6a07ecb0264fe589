"""Archives that unpack to far more than they hold are refused before that is in memory."""

from __future__ import annotations

import gzip
import io
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from coterie.errors import TraceError
from coterie.traces.readers import _rows, read_trace
from coterie.traces.readers.servegen import read_servegen_clients

LIMIT = 1 << 20
BOMB = 40 * LIMIT


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rows, "ALWAYS_BYTES", LIMIT)


def npz(folder: Path) -> Path:
    np.savez_compressed(folder / "bomb.npz", expert_ids=np.zeros((BOMB // 4, 2, 2), np.uint8), offsets=np.zeros(2))
    return folder / "bomb.npz"


def sidecar(folder: Path) -> Path:
    ids = np.random.default_rng(0).integers(0, 32, (40, 4, 4)).astype(np.uint8)
    gates = np.zeros(ids.shape, np.float16)
    np.savez_compressed(folder / "routing.npz", expert_ids=ids, gate_probs_f16=gates, offsets=np.array([0, 40]))
    (folder / "requests.jsonl.gz").write_bytes(gzip.compress(bytes(BOMB)))
    return folder / "routing.npz"


def tar(folder: Path) -> Path:
    with tarfile.open(folder / "bomb.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("chunk-0-trace.csv")
        member.size = BOMB
        archive.addfile(member, io.BytesIO(bytes(BOMB)))
    return folder / "bomb.tar.gz"


def packed_csv(folder: Path) -> Path:
    rows = b"arrival_s,prompt_tokens,output_tokens\n" + b"1,1,1\n" * 20
    (folder / "bomb.csv.gz").write_bytes(gzip.compress(rows + b" " * BOMB))
    return folder / "bomb.csv.gz"


def packed_jsonl(folder: Path) -> Path:
    row = b'{"arrival_s": 1, "prompt_tokens": 1, "output_tokens": 1}\n'
    (folder / "bomb.jsonl.gz").write_bytes(gzip.compress(row + b" " * BOMB))
    return folder / "bomb.jsonl.gz"


@pytest.mark.parametrize("make", [npz, sidecar, tar, packed_csv, packed_jsonl])
def test_a_bomb_is_refused(tmp_path: Path, make: object) -> None:
    assert callable(make)
    path = make(tmp_path)
    read = read_servegen_clients if make is tar else read_trace
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match="unpacks to at least"):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < BOMB
    finally:
        tracemalloc.stop()


def test_what_is_small_is_read_at_any_ratio(tmp_path: Path) -> None:
    ids = np.zeros((400_000, 2, 1), np.uint8)
    np.savez_compressed(tmp_path / "flat.npz", expert_ids=ids, offsets=np.array([0, 400_000]), num_experts=8)
    assert (tmp_path / "flat.npz").stat().st_size * _rows.MOST_RATIO < ids.nbytes < LIMIT
    read_trace(tmp_path / "flat.npz")
