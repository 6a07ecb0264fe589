"""The tour compares the same work, and shows the idea."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.evaluation.demo import WAYS, batches, run_demo


@pytest.mark.parametrize("way", WAYS)
def test_every_way_cuts_the_same_requests(way):
    domains = np.array(["a", "b", "c", "a"] * 16)
    chosen = batches(way, domains, 8)
    assert sorted(np.concatenate(chosen).tolist()) == list(range(64))
    shares = [np.mean(domains[batch] == "a") for batch in chosen]
    if way == "alike":
        assert set(shares) == {0.0, 1.0}
    else:
        assert all(share == pytest.approx(0.5, abs=0.13) for share in shares)


def test_like_requests_decode_faster_and_unlike_ones_prefill_faster():
    decode, prefill = np.array_split(np.array([r.step_ms for r in run_demo(requests=320).rows]), 2)
    arrive, alike, unlike = range(3)
    assert decode[alike] < decode[arrive] < decode[unlike] * 1.02
    assert prefill[unlike] < prefill[alike]


def test_the_same_seed_gives_the_same_rows():
    assert run_demo(seed=3, requests=64) == run_demo(seed=3, requests=64)
