"""The published strategies against plain references, against each other, and against theory."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations, permutations
from math import comb
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import chisquare

from coterie import batching
from coterie._numba import njit
from coterie.batching import (
    BestFit,
    Differencing,
    Fcfs,
    GreedyDotProduct,
    GreedyVariance,
    KarmarkarKarp,
    Lpt,
    LptBalanced,
    NormMinimizing,
    PowerOfD,
    PowerOfDDot,
    RandomSample,
    Strategy,
    Window,
    strategies,
)
from coterie.batching.by_weight import sides_of
from coterie.errors import ConfigError

PUBLISHED = {
    "fcfs": Fcfs,
    "random": RandomSample,
    "greedy_variance": GreedyVariance,
    "greedy_dot_product": GreedyDotProduct,
    "norm_minimizing": NormMinimizing,
    "best_fit": BestFit,
    "differencing": Differencing,
    "power_of_d": PowerOfD,
    "power_of_d_dot": PowerOfDDot,
    "lpt": Lpt,
    "lpt_balanced": LptBalanced,
    "karmarkar_karp": KarmarkarKarp,
}
GREEDY = [GreedyVariance, NormMinimizing, GreedyDotProduct, BestFit, Differencing, LptBalanced]
MAX_SKIPS = 3

Snapshot = tuple[Window, np.ndarray, int]
Vector = list[int]


def snapshot(loads: Any, size: int, running: Any = None, skipped: Any = None) -> Snapshot:
    """loads [request, expert] of one layer, or [request, layer, expert]."""
    array = np.array(loads, np.float64, order="C")
    array = array[:, None, :] if array.ndim == 2 else array
    skips = np.zeros(len(array), np.int64) if skipped is None else np.array(skipped, np.int64)
    window = Window(array, skips, len(array))
    return window, window.no_load() if running is None else np.array(running, np.float64).reshape(array.shape[1:]), size


def picks(strategy: Strategy, given: Snapshot, seed: int = 0) -> list[int]:
    order: list[int] = strategy.select(*given, np.random.default_rng(seed)).order.tolist()
    return order


@st.composite
def snapshots(draw: st.DrawFn, same_total: bool = False, same_norm: bool = False) -> Snapshot:
    """Few values, so that ties are common."""
    waiting, layers, experts = draw(st.integers(1, 12)), draw(st.integers(1, 2)), draw(st.integers(1, 5))
    columns = layers * experts
    if same_norm:
        row = draw(st.lists(st.integers(0, 6), min_size=columns, max_size=columns))
        loads = np.array([draw(st.permutations(row)) for _ in range(waiting)])
    elif same_total:
        cells = draw(hnp.arrays(np.int64, (waiting, 8), elements=st.integers(0, columns - 1)))
        loads = np.array([np.bincount(row, minlength=columns) for row in cells])
    else:
        loads = draw(hnp.arrays(np.int64, (waiting, columns), elements=st.integers(0, 6)))
    running = draw(hnp.arrays(np.int64, columns, elements=st.integers(0, 9)))
    skipped = draw(hnp.arrays(np.int64, waiting, elements=st.integers(0, MAX_SKIPS)))
    return snapshot(loads.reshape(waiting, layers, experts), draw(st.integers(0, 14)), running, skipped)


def forced(given: Snapshot) -> list[int]:
    window, _, size = given
    return [r for r in range(len(window.loads)) if r == 0 or window.skipped[r] >= MAX_SKIPS][:size]


def greedily(given: Snapshot, key: Callable[[Vector, Vector], Any]) -> list[int]:
    """The oldest, the overdue, then again and again the least key(load, candidate); ties to the older."""
    window, running, size = given
    rows = [[int(x) for x in row.ravel()] for row in window.loads]
    load, order = [int(x) for x in running.ravel()], []
    for pick in range(min(size, len(rows))):
        due = forced(given)
        left = [r for r in range(len(rows)) if r not in order]
        best = due[pick] if pick < len(due) else min(left, key=lambda r: (key(load, rows[r]), r))
        order.append(best)
        load = [a + b for a, b in zip(load, rows[best], strict=True)]
    return order


def total(load: Vector, row: Vector) -> Vector:
    return [a + b for a, b in zip(load, row, strict=True)]


def variance(load: Vector, row: Vector) -> Fraction:
    new = total(load, row)
    return Fraction(sum(x * x for x in new), len(new)) - Fraction(sum(new), len(new)) ** 2


def norm(load: Vector, row: Vector) -> int:
    return sum(x * x for x in total(load, row))


def dot(load: Vector, row: Vector) -> int:
    return sum(a * b for a, b in zip(load, row, strict=True))


def deviation(load: Vector, row: Vector) -> Fraction:
    mean_load, mean_row = Fraction(sum(load), len(load)), Fraction(sum(row), len(row))
    return sum(((a - mean_row) * (b - mean_load) for a, b in zip(row, load, strict=True)), Fraction(0))


def variation(load: Vector, row: Vector) -> float:
    """The squared coefficient of variation, up to a shift and a factor that are the same for all."""
    new = total(load, row)
    return sum(x * x for x in new) / sum(new) ** 2 if sum(new) else 0.0


def distance_to_even(given: Snapshot) -> Callable[[Vector, Vector], Fraction]:
    window, running, size = given
    batch = min(size, len(window.loads))
    level = (Fraction(int(running.sum())) + batch * Fraction(int(window.loads.sum()), len(window.loads))) / running.size
    return lambda load, row: sum(((x - level) ** 2 for x in total(load, row)), Fraction(0))


def reference(kind: Callable[..., Any], given: Snapshot) -> list[int]:
    keys: dict[Callable[..., Any], Callable[[Vector, Vector], Any]] = {
        GreedyVariance: variance,
        NormMinimizing: norm,
        GreedyDotProduct: dot,
        Differencing: deviation,
        LptBalanced: variation,
    }
    return greedily(given, distance_to_even(given) if kind is BestFit else keys[kind])


# The registry ---------------------------------------------------------------------------------------------------------


def test_the_published_names_are_registered_and_public() -> None:
    registered: dict[str, object] = {name: strategies[name] for name in PUBLISHED}
    assert registered == PUBLISHED
    assert {kind.__name__ for kind in PUBLISHED.values()} <= set(batching.__all__)
    assert all(hasattr(batching, name) for name in batching.__all__)


@pytest.mark.parametrize("kind", PUBLISHED.values())
@pytest.mark.parametrize("max_skips", [0, -1, 2.5, True, "many"])
def test_a_bad_limit_is_refused(kind: Callable[..., Any], max_skips: Any) -> None:
    with pytest.raises(ConfigError, match="max_skips="):
        kind(max_skips=max_skips)


@pytest.mark.parametrize("kind", [PowerOfD, PowerOfDDot])
def test_bad_samples_are_refused(kind: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="d=0 must be"):
        kind(d=0)
    with pytest.raises(ConfigError, match="max_skips=0 must be"):
        kind(max_skips=0)
    assert kind().d == 8


@pytest.mark.parametrize("kind", PUBLISHED.values())
def test_a_snapshot_that_does_not_fit_together_is_refused(kind: Callable[..., Any], rng: np.random.Generator) -> None:
    window, running, _ = snapshot(np.ones((3, 2, 4)), 2)
    with pytest.raises(ConfigError, match=r"running has shape \(4,\)"):
        kind().select(window, running[0], 2, rng)
    with pytest.raises(ConfigError, match="skipped has 2"):
        kind().select(window._replace(skipped=window.skipped[:2]), running, 2, rng)
    with pytest.raises(ConfigError, match=r"loads \(3, 2, 2\)"):
        kind().select(window._replace(loads=window.loads[:, :, ::2]), running[:, ::2], 2, rng)
    with pytest.raises(ConfigError, match="size=-1 must be at least 0"):
        kind().select(window, running, -1, rng)


# Who must be taken ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PUBLISHED.values())
def test_the_oldest_and_the_overdue_come_first(kind: Callable[..., Any], rng: np.random.Generator) -> None:
    skipped = np.array([0, 9, 2, 3, 0, 0, 8, 0])
    given = snapshot(rng.integers(0, 9, (8, 6)), 6, skipped=skipped)
    selection = kind(max_skips=3).select(*given, rng)
    assert selection.order[:4].tolist() == [0, 1, 3, 6]
    assert selection.reason.endswith("of 8 waiting, after 3 overdue")
    assert picks(kind(max_skips=3), (*given[:2], 2)) == [0, 1]


@pytest.mark.parametrize("max_skips", [None, 1001])
def test_without_a_limit_nobody_is_forced(max_skips: int | None) -> None:
    given = snapshot([[5, 5], [0, 0], [0, 1], [9, 9]], 2, skipped=[0, 1000, 1000, 0])
    assert picks(Lpt(max_skips=max_skips), given) == [0, 3]
    assert picks(Lpt(max_skips=1000), given) == [0, 1]


# Greedy ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GREEDY)
@given(given=snapshots())
def test_greedy_equals_the_definition(kind: Callable[..., Any], given: Snapshot) -> None:
    assert picks(kind(max_skips=MAX_SKIPS), given) == reference(kind, given)


@pytest.mark.parametrize("kind", GREEDY)
@pytest.mark.parametrize("top", [3, 200, 40_000, 3_000_000])
def test_large_batches_equal_the_definition(kind: Callable[..., Any], top: int, rng: np.random.Generator) -> None:
    """From 16 picks on small whole numbers take another loop; the larger ones do not fit it."""
    given = snapshot(rng.integers(0, top, (40, 2, 5)), 24, rng.integers(0, 5 * top, (2, 5)))
    assert picks(kind(max_skips=MAX_SKIPS), given) == reference(kind, given)


@pytest.mark.parametrize("kind", GREEDY)
@pytest.mark.parametrize("size", [8, 40])
def test_scale_changes_nothing(kind: Callable[..., Any], size: int, rng: np.random.Generator) -> None:
    window, running, _ = snapshot(rng.integers(0, 99, (48, 3, 7)), size, rng.integers(0, 99, (3, 7)))
    plain = picks(kind(), (window, running, size))
    for scale in (0.25, 2.0**-12, 2.0**12):
        assert picks(kind(), (window._replace(loads=window.loads * scale), running * scale, size)) == plain


@pytest.mark.parametrize("kind", GREEDY)
@given(given=snapshots(), seed=st.integers(0, 99))
def test_which_column_is_which_changes_nothing(kind: Callable[..., Any], given: Snapshot, seed: int) -> None:
    window, running, size = given
    shuffle = np.random.default_rng(seed).permutation(running.size)
    flat = window.loads.reshape(len(window.loads), -1)
    shuffled = snapshot(flat[:, shuffle], size, running.ravel()[shuffle], window.skipped)
    assert picks(kind(), shuffled) == picks(kind(), given)


@given(given=snapshots(same_total=True))
def test_with_one_total_variance_norm_and_best_fit_agree_and_so_do_dot_and_differencing(given: Snapshot) -> None:
    flat = [picks(kind(), given) for kind in (GreedyVariance, NormMinimizing, BestFit, LptBalanced)]
    assert flat == flat[:1] * 4
    assert picks(GreedyDotProduct(), given) == picks(Differencing(), given)


@given(given=snapshots(same_norm=True))
def test_with_one_total_and_one_norm_all_six_agree(given: Snapshot) -> None:
    assert len({tuple(picks(kind(), given)) for kind in GREEDY}) == 1


def test_dot_and_differencing_do_not_see_a_spike_of_the_candidate_itself() -> None:
    given = snapshot([[1, 1, 1, 1], [4, 0, 0, 0], [1, 1, 1, 1]], 2)
    assert [picks(kind(), given)[1] for kind in (GreedyVariance, NormMinimizing, BestFit)] == [2, 2, 2]
    assert [picks(kind(), given)[1] for kind in (GreedyDotProduct, Differencing)] == [1, 1]


def test_of_two_as_uneven_lpt_balanced_takes_the_heavier() -> None:
    given = snapshot([[4, 0, 0, 0], [0, 1, 1, 1], [0, 2, 2, 2]], 2)
    assert picks(LptBalanced(), given)[1] == 2
    assert picks(GreedyDotProduct(), given)[1] == 1


def test_norm_and_dot_prefer_the_light_and_variance_what_fills_the_valley() -> None:
    given = snapshot([[6, 2], [0, 5], [1, 0]], 2)
    assert [picks(kind(), given)[1] for kind in (GreedyVariance, BestFit, Differencing)] == [1, 1, 1]
    assert [picks(kind(), given)[1] for kind in (NormMinimizing, GreedyDotProduct)] == [2, 2]


@pytest.mark.parametrize("kind", [GreedyVariance, BestFit, Differencing])
@given(given=snapshots(), level=st.integers(0, 50))
def test_an_even_load_below_changes_nothing_for_measures_of_evenness(
    kind: Callable[..., Any], given: Snapshot, level: int
) -> None:
    window, running, size = given
    assert picks(kind(), (window, running + level, size)) == picks(kind(), given)


# Power of d -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sampled", "whole"), [(PowerOfD, GreedyVariance), (PowerOfDDot, GreedyDotProduct)])
@given(given=snapshots(), seed=st.integers(0, 99))
def test_looking_at_all_is_greedy(
    sampled: Callable[..., Any], whole: Callable[..., Any], given: Snapshot, seed: int
) -> None:
    for d in (len(given[0].loads), 99):
        assert picks(sampled(d=d, max_skips=3), given, seed) == picks(whole(max_skips=3), given)


@pytest.mark.parametrize("kind", [PowerOfD, PowerOfDDot])
@pytest.mark.parametrize("d", [1, 3])
def test_the_best_of_d_has_the_rank_that_counting_gives(
    kind: Callable[..., Any], d: int, rng: np.random.Generator
) -> None:
    """The candidate of rank k of m is taken if it is drawn and no better one is: C(m-1-k, d-1) / C(m, d)."""
    m, trials = 9, 8000
    ranks = rng.permutation(m)
    # Total and spread rise with the rank, in columns that the oldest fills.
    given = snapshot([[9, 0], *([rank + 1, 0] for rank in ranks)], 2)
    strategy, counts = kind(d=d), np.zeros(m)
    for _ in range(trials):
        counts[ranks[strategy.select(*given, rng).order[1] - 1]] += 1
    expected = np.array([comb(m - 1 - k, d - 1) / comb(m, d) for k in range(m)]) * trials
    assert counts[expected == 0].sum() == 0
    assert chisquare(counts[expected > 0], expected[expected > 0]).pvalue > 1e-3


# Random ---------------------------------------------------------------------------------------------------------------


def test_random_takes_every_ordered_sample_equally_often(rng: np.random.Generator) -> None:
    given, strategy, trials = snapshot(np.zeros((7, 2)), 4), RandomSample(), 24_000
    seen = Counter(tuple(strategy.select(*given, rng).order.tolist()) for _ in range(trials))
    expected = {(0, *rest) for rest in permutations(range(1, 7), 3)}
    assert set(seen) == expected
    assert chisquare([seen[key] for key in expected]).pvalue > 1e-3


# FCFS and LPT ---------------------------------------------------------------------------------------------------------


@given(given=snapshots())
def test_fcfs_takes_the_oldest(given: Snapshot) -> None:
    due, count = forced(given), min(given[2], len(given[0].loads))
    rest = [r for r in range(len(given[0].loads)) if r not in due]
    assert picks(Fcfs(max_skips=MAX_SKIPS), given) == [*due, *rest][:count]
    assert picks(Fcfs(max_skips=None), given) == list(range(count))


@given(given=snapshots())
def test_lpt_takes_the_heaviest(given: Snapshot) -> None:
    window, _, size = given
    totals, due = window.loads.sum(axis=(1, 2)), forced(given)
    rest = sorted((r for r in range(len(totals)) if r not in due), key=lambda r: (-totals[r], r))
    assert picks(Lpt(max_skips=MAX_SKIPS), given) == [*due, *rest][: min(size, len(totals))]


# Karmarkar-Karp -------------------------------------------------------------------------------------------------------


def differencing_value(totals: list[int]) -> int:
    """The classic algorithm on bare numbers: what it leaves."""
    heap = [-value for value in totals]
    heapq.heapify(heap)
    while len(heap) > 1:
        heapq.heappush(heap, heapq.heappop(heap) - heapq.heappop(heap))
    return -heap[0]


def differencing_sides(totals: list[int]) -> list[bool]:
    """Edges between opposite sides, then colours from the oldest request on."""
    heap, edges = [(-value, r) for r, value in enumerate(totals)], {r: list[int]() for r in range(len(totals))}
    heapq.heapify(heap)
    while len(heap) > 1:
        (large, first), (small, second) = heapq.heappop(heap), heapq.heappop(heap)
        edges[first].append(second)
        edges[second].append(first)
        heapq.heappush(heap, (large - small, first))
    side, reached = {0: True}, [0]
    for request in reached:
        for other in edges[request]:
            if other not in side:
                side[other] = not side[request]
                reached.append(other)
    return [side[r] for r in range(len(totals))]


@njit()
def compiled_sides(totals: np.ndarray) -> np.ndarray:
    return sides_of(totals)


def sides(totals: list[int]) -> list[bool]:
    """Through a function of its own, since compiled code calls it too: see coterie.batching.picking."""
    sides: list[bool] = compiled_sides(np.array(totals, np.float64)).tolist()
    return sides


def left_over(totals: list[int]) -> int:
    signs = np.where(sides(totals), 1, -1)
    return abs(int(signs @ np.array(totals)))


@pytest.mark.parametrize(
    ("totals", "leaves"),
    [([8, 7, 6, 5, 4], 2), ([4, 5, 6, 7, 8], 2), ([10, 8, 7, 6, 5], 2), ([5, 5], 0), ([7], 7), ([9, 1, 1, 1], 6)],
)
def test_classic_cases(totals: list[int], leaves: int) -> None:
    assert left_over(totals) == leaves


@given(totals=st.lists(st.integers(0, 40), min_size=1, max_size=10))
def test_sides_differ_by_what_differencing_leaves_and_never_by_less_than_the_best_split(totals: list[int]) -> None:
    assert sides(totals) == differencing_sides(totals)
    assert left_over(totals) == differencing_value(totals)
    splits = (sum(part) for k in range(len(totals) + 1) for part in combinations(totals, k))
    assert left_over(totals) >= min(abs(sum(totals) - 2 * part) for part in splits)


@given(given=snapshots())
def test_karmarkar_karp_takes_the_side_of_the_oldest(given: Snapshot) -> None:
    window, _, size = given
    totals, due = [int(x) for x in window.loads.sum(axis=(1, 2))], forced(given)
    mine, waiting = differencing_sides(totals), range(len(totals))
    same = sorted((r for r in waiting if mine[r] and r not in due), key=lambda r: (-totals[r], r))
    rest = [r for r in waiting if not mine[r] and r not in due]
    assert picks(KarmarkarKarp(max_skips=MAX_SKIPS), given) == [*due, *same, *rest][: min(size, len(totals))]


def test_two_hundred_requests_split_as_the_reference_does(rng: np.random.Generator) -> None:
    totals = rng.integers(0, 5000, 200).tolist()
    assert sides(totals) == differencing_sides(totals)
