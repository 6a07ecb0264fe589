"""The benchmark of the KV directory, on a small one."""

from __future__ import annotations

from coterie_lab.benches.kvindex import kv_directory_rows


def test_rows() -> None:
    rows = kv_directory_rows(lambda *_: None, num_blocks=3136, num_workers=4, prompts=3)
    names = [row["name"] for row in rows]
    assert names == [
        *(["kv_match_tokens"] * 2),
        *(["kv_match_hashes"] * 2),
        *(["kv_match_hash_list"] * 2),
        "kv_apply",
        *(["kv_stream"] * 3),
    ]
    assert all(row["blocks"] == 3136 for row in rows[:7])
    assert all(row["median_us"] > 0 for row in rows[:6])
    assert rows[6]["holdings"] == 2 * 16 * 256
    assert all(row["blocks_per_s"] > 0 for row in rows[6:])
