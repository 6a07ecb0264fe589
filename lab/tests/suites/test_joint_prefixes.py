"""Shared prefixes in the joint suite: what is drawn, what is served, and what is said of it."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.traces import RequestTrace
from coterie_lab.suites.eldr.synthetic import SyntheticSize
from coterie_lab.suites.joint import prefixes as cells
from coterie_lab.suites.joint.prefix_report import PREFIX_TABLES, prefix_notes, prefix_rows
from coterie_lab.suites.joint.prefixes import KV_ONLY, NO_HOMES, SHORTEST, VARIANTS, PrefixCell, PrefixOutcomes
from coterie_lab.suites.joint.suite import prefix_jobs_of

TINY = SyntheticSize(recordings=130, fitted=65, prompt_tokens=8, output_tokens=8)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.75])
def test_prompts_share_a_prefix_of_their_family_and_nothing_else(share: float) -> None:
    rng = np.random.default_rng(1)
    kinds = rng.integers(cells.KINDS, size=60)
    trace = cells.shared_prefixes(share, kinds, rng)
    blocks = [one.tolist() for one in trace.prefix_blocks or ()]
    for tokens, own in zip(trace.prompt_tokens.tolist(), blocks, strict=True):
        assert len(own) == tokens // cells.BLOCK_TOKENS
        assert len(set(own)) == len(own)
    common = set.intersection(*map(set, blocks)) if share == 0 else set()
    assert not common
    together = 0
    for (a, first), (b, second) in combinations(enumerate(blocks), 2):
        shared = set(first) & set(second)
        together += bool(shared)
        depth = len(shared)
        assert first[:depth] == second[:depth], "what is shared leads"
        assert depth <= round(share * min(trace.prompt_tokens[a], trace.prompt_tokens[b]) / cells.BLOCK_TOKENS)
        assert not shared or kinds[a] == kinds[b]
    assert (together > 0) == (share > 0)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_requests_of_one_tick_are_spread_until_the_next(ticks: list[int]) -> None:
    times = np.sort(np.array(ticks, float)) * 3.0
    found = cells.spread(RequestTrace(np.ones(len(times), int), np.ones(len(times), int), times)).arrival_s
    assert found is not None
    assert (np.diff(found) >= 0).all()
    assert (found >= times).all()
    for tick in np.unique(times):
        later = times[times > tick]
        assert found[np.searchsorted(times, tick)] == tick
        assert not len(later) or found[times == tick].max() < later[0]


def test_a_request_is_of_the_kind_that_brought_its_prefix() -> None:
    blocks = [[0, 1, 2], [0, 3], [0, 1, 4], [0, 3, 5], [0], [0, 1, 4, 6]]
    trace = RequestTrace(
        np.full(6, 2048), np.ones(6, int), np.arange(6.0), prefix_blocks=[*map(np.array, blocks)], block_tokens=512
    )
    seen = set()
    for seed in range(20):
        kinds = cells.inherited_kinds(trace, np.random.default_rng(seed))
        assert kinds[0] == kinds[2] == kinds[5]
        assert kinds[1] == kinds[3]
        seen.add((kinds[0] == kinds[1], kinds[0] == kinds[4]))
    assert len(seen) > 1, "the block that all begin with says nothing"


def test_recordings_are_of_the_requests_kind_in_turn() -> None:
    rng = np.random.default_rng(0)
    clusters, kinds = np.arange(40) % cells.KINDS, rng.integers(cells.KINDS, size=200)
    recorded = cells.recordings_of(kinds, clusters, rng)
    assert (clusters[recorded] == kinds).all()
    for kind in range(cells.KINDS):
        uses = recorded[kinds == kind].tolist()
        assert all(len(set(uses[at : at + 5])) == len(uses[at : at + 5]) for at in range(len(uses)))


@pytest.fixture(scope="module")
def served() -> dict[float, PrefixOutcomes]:
    return {
        share: cells.serve_prefix_cell(PrefixCell("olmoe-1b-7b", share, 0), None, 150, TINY) for share in (0.0, 0.75)
    }


def test_a_term_that_sees_no_difference_changes_nothing(served: dict[float, PrefixOutcomes]) -> None:
    for found in served.values():
        assert found[NO_HOMES] == found[KV_ONLY], "whole workers hold all experts"
    alone = served[0.0]
    assert alone[KV_ONLY] == alone[SHORTEST] == alone[cells.LIGHT_KV]
    assert {one.hit_pct for one in alone.values()} == {0.0}


def test_the_kv_term_finds_what_is_shared(served: dict[float, PrefixOutcomes]) -> None:
    shared = served[0.75]
    assert shared[KV_ONLY].hit_pct > shared[cells.ROUND_ROBIN].hit_pct > 0
    assert shared[KV_ONLY] != shared[cells.EXPERT_ONLY] != shared[SHORTEST]
    assert all(one.experts_per_step >= 8 for one in shared.values()), "OLMoE has 8 of 64"


def made(ttft: float, tpot: float) -> cells.PrefixOutcome:
    return cells.PrefixOutcome(ttft, ttft, 3 * ttft, tpot, 2 * tpot, 40.0, 12.0, 1.1, 0.0, 0.5)


def made_cell(jitter: float, joint: float, crowded: float) -> PrefixOutcomes:
    """`joint`: TTFT of joint by KV only's; `crowded`: TPOT of KV only by the shortest queue's."""
    kv = made(80 + jitter, 10 * crowded + jitter / 10)
    return {
        **dict.fromkeys(VARIANTS, made(100 + jitter, 10 + jitter / 10)),
        KV_ONLY: kv,
        NO_HOMES: kv,
        cells.JOINT: kv._replace(ttft_mean_ms=joint * kv.ttft_mean_ms + 0.01 * jitter),
        cells.LIGHT_JOINT: made(100 + jitter, 10 + jitter / 10),
    }


@pytest.mark.parametrize(
    ("joint", "crowded", "said", "crowds"),
    [
        (1.0, 1.0, "It adds nothing: nothing shared, Mooncake's prefixes.", False),
        (0.9, 1.0, "It helps: nothing shared, Mooncake's prefixes.", False),
        (0.995, 1.0, "It helps by less than 1%: nothing shared, Mooncake's prefixes.", False),
        (1.1, 2.0, "It hurts: nothing shared, Mooncake's prefixes.", True),
    ],
)
def test_it_says_where_the_expert_term_adds_nothing(joint: float, crowded: float, said: str, crowds: bool) -> None:
    jitter = (0.0, 1.0, -1.0)
    found = {
        PrefixCell("gpt-oss-20b", share, seed): made_cell(
            jitter[seed], joint if joint != 1 else 1 + 1e-3 * (1 - seed), crowded
        )
        for share in (0.0, None)
        for seed in range(3)
    }
    rows = prefix_rows(found)
    notes = prefix_notes(rows)
    (expert,) = (note for note in notes if "(joint against KV only)" in note)
    assert said in expert
    assert "up to 41% less all-to-all communication than KV only" in expert
    assert any("to the last digit" in note for note in notes)
    assert any("requests crowd" in note for note in notes) == crowds
    assert len(rows) == 2 * len(VARIANTS)
    shown = [row for table in PREFIX_TABLES for row in rows if table.shows(row)]
    assert shown == rows
    assert all(isinstance(column.value(row), str) for row in rows for column in PREFIX_TABLES[0].columns)
    json.dumps(rows)


def test_one_seed_is_no_verdict() -> None:
    notes = prefix_notes(prefix_rows({PrefixCell("gpt-oss-20b", 0.5, 0): made_cell(0.0, 0.9, 1.0)}))
    assert any("is not told apart from chance by one seed" in note for note in notes)


def test_mooncakes_own_prefixes_need_its_trace(tmp_path: Path) -> None:
    assert {job.trace for job in prefix_jobs_of(None, (0,))} == {cells.SYNTHETIC}
    (tmp_path / "activations").mkdir()
    assert all(job.share is not None for job in prefix_jobs_of(tmp_path, (0,)))
    (tmp_path / "requests/mooncake").mkdir(parents=True)
    (tmp_path / "requests/mooncake/conversation_trace.jsonl").touch()
    assert sum(job.share is None for job in prefix_jobs_of(tmp_path, (0, 1))) == 4
