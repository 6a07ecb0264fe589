"""Local activation rates: schedules keep their shares, rates are what theory says, and rows have what they must."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.answers.suites import SuiteOptions
from coterie.traces import ActivationTrace, TraceMeta
from coterie_lab.suites.sem_moe import locality
from coterie_lab.suites.sem_moe.homes import after_ranks, aligned, surer
from coterie_lab.suites.sem_moe.locality import locality_notes, locality_rows
from coterie_lab.suites.sem_moe.samples import FIT_SHARE, split, table_sample
from coterie_lab.suites.shared import median_imbalance
from simulate_traces import quiet

EXPERTS, LAYERS, TOP_K, THEMES = 16, 3, 2, 4


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 999), st.integers(1, 5), st.integers(1, 6), st.integers(1, 4))
def test_every_rank_gets_its_share_of_every_batch(seed: int, ranks: int, each: int, batches: int) -> None:
    size = ranks * each
    homes = aligned(np.random.default_rng(seed).random((size * batches, ranks)), batches)
    for batch in homes.reshape(batches, size):
        assert np.bincount(batch, minlength=ranks).tolist() == [each] * ranks


def test_who_has_the_most_to_lose_chooses_first() -> None:
    scores = np.array([[1.0, 0.9], [1.0, 0.0], [0.7, 0.5], [0.0, 0.3]])
    assert aligned(scores, 1).tolist() == [1, 0, 0, 1]


def test_the_ranks_before_tell_the_next_where_they_decide_it() -> None:
    rng = np.random.default_rng(0)
    before = rng.integers(0, 4, (2000, 2))
    here = np.eye(4)[np.column_stack([before, (before[:, 1] + 1) % 4])]  # [token, layer, rank]
    expected = after_ranks(here[:1000], here[1000:], 2)
    assert np.array_equal(expected.argmax(axis=1), here[1000:, 2].argmax(axis=1))
    flat = np.full((1000, 4), 0.25)
    assert np.array_equal(surer(flat, expected), expected)
    assert np.array_equal(surer(expected, flat), expected)


def test_requests_with_one_prompt_stay_together() -> None:
    groups = [f"prompt {n // 2}" for n in range(100)]
    fit, test = split(groups, np.random.default_rng(0))
    assert len(fit) == FIT_SHARE * 100
    assert sorted([*fit, *test]) == list(range(100))
    assert not {groups[n] for n in fit} & {groups[n] for n in test}


def test_counts_of_a_table_are_divided() -> None:
    counts = np.random.default_rng(1).poisson(30.0, (50, 2, 8)).astype(np.float32)
    sample = table_sample(counts, 2, np.random.default_rng(0))
    assert sample.load + sample.test_load == pytest.approx(counts.sum(axis=0))
    assert sample.load.sum() == pytest.approx(FIT_SHARE * counts.sum(), rel=0.05)
    assert sample.truth.sum(axis=2) == pytest.approx(np.full(sample.truth.shape[:2], 2.0), rel=1e-5)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[locality.Row]:
    """Experts are a function of the token, tokens and experts have themes, requests keep to one."""
    rng = np.random.default_rng(5)
    theme = np.arange(40) % THEMES
    prefers = (np.arange(EXPERTS) % THEMES)[None, None] == theme[:, None, None]
    function = np.argsort(-(rng.random((40, LAYERS, EXPERTS)) + prefers), axis=-1)[..., :TOP_K]
    per_theme = [np.flatnonzero(theme == n) for n in range(THEMES)]
    tokens = np.concatenate([rng.choice(per_theme[n % THEMES], 30) for n in range(60)]).astype(np.int32)
    trace = ActivationTrace.from_arrays(
        TraceMeta("themes", EXPERTS, LAYERS, TOP_K),
        function[tokens].astype(np.uint8),
        np.arange(0, len(tokens) + 1, 30),
        token_ids=tokens,
    )
    path = tmp_path_factory.mktemp("locality") / "themes"
    trace.save(path)
    return locality_rows(SuiteOptions(trace=path, seeds=(0, 1)), quiet)


def rate(rows: list[locality.Row], planner: str, schedule: str, items: str = "tokens", ep: int = 4) -> float:
    wanted = (planner, schedule, items, ep, "")
    keys = ("planner", "schedule", "items", "ep", "setting")
    (found,) = [row["local_activation_rate"] for row in rows if tuple(row[key] for key in keys) == wanted]
    return float(found)


def test_rows_have_what_they_must(rows: list[locality.Row]) -> None:
    wanted = {"trace", "planner", "ep", "local_activation_rate", "imbalance", "published"}
    assert all(wanted <= {*row} for row in rows)
    assert {row["planner"] for row in rows} == {"vanilla", "popularity", "moetuner", "sem_moe", "co_cluster"}
    assert {row["ep"] for row in rows} == {2, 4, 8}
    assert {row["items"] for row in rows} == {"tokens", "requests"}
    assert [row["planner"] for row in rows if row["published"]] == ["sem_moe", "sem_moe"]


@pytest.mark.parametrize("planner", ["vanilla", "popularity", "moetuner", "sem_moe", "co_cluster"])
def test_tokens_dealt_in_turn_are_local_by_chance(rows: list[locality.Row], planner: str) -> None:
    assert rate(rows, planner, "round_robin") == pytest.approx(1 / 4, abs=0.06)
    assert rate(rows, planner, "affinity") <= rate(rows, planner, "oracle") + 0.02


@pytest.mark.parametrize("items", ["tokens", "requests"])
def test_planted_themes_are_found(rows: list[locality.Row], items: str) -> None:
    """A batch does not have as many tokens of each theme, so that not all can be where their experts are."""
    for planner in ("sem_moe", "co_cluster"):
        assert rate(rows, planner, "affinity", items) > 1.4 * rate(rows, "vanilla", "affinity", items)


def test_notes_say_what_is_gained(rows: list[locality.Row], tmp_path: Path) -> None:
    notes = locality_notes(rows)
    assert any(note.startswith("themes, tokens as items, EP8: co_cluster keeps") for note in notes)
    assert locality_notes(locality_rows(SuiteOptions(data=tmp_path), quiet))[0].startswith("No local activation rates")


def test_the_busiest_rank_over_the_median() -> None:
    load = np.array([[4.0, 1.0, 2.0], [0.0, 0.0, 0.0], [3.0, 0.0, 0.0]])
    assert median_imbalance(load).tolist() == [2.0, 1.0, np.inf]
