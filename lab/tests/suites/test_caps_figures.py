"""The figures of the CAPS and the regimes suites."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from coterie.answers.figures import LIGHT, WIDTH_IN
from coterie_lab.suites.caps import figures as caps_figures
from coterie_lab.suites.caps.published import RATES, published
from coterie_lab.suites.regimes import figures as regimes_figures
from coterie_lab.suites.regimes.figures import CLIP_PCT, COLORS

STRATEGIES: tuple[str, ...] = (
    "fcfs",
    "best_fit",
    "differencing",
    "greedy_dot_product",
    "greedy_variance",
    "karmarkar_karp",
)
STRATEGIES += ("latency_aware", "lpt", "lpt_balanced", "norm_minimizing", "power_of_d", "power_of_d_dot", "random")


def caps_row(
    pattern: Any, rate: Any, strategy: Any, gain: float = 10.0, half: float | None = 2.0, known: bool = True
) -> Any:
    row = {"pattern": pattern, "rate": rate, "strategy": strategy, "fitted": rate in (150.0, 300.0)}
    gain = 0.0 if strategy == "fcfs" else gain
    low, high = (None, None) if half is None else (gain - half, gain + half)
    row |= {"p99_reduction_pct": gain, "p99_reduction_low": low, "p99_reduction_high": high}
    return row | {"published": published(pattern, rate, strategy) if known else None}


def caps_rows(
    strategies: tuple[str, ...] = STRATEGIES,
    rates: Any = RATES,
    patterns: tuple[str, ...] = ("bursty", "poisson"),
    **options: Any,
) -> list[Any]:
    return [
        caps_row(pattern, rate, name, gain=40.0 - 2 * place - rate / 20, **options)
        for pattern in patterns
        for rate in rates
        for place, name in enumerate(strategies)
    ]


def filled(fill: Any, *numbers: Any) -> Figure:
    figure = Figure(figsize=(WIDTH_IN, 4.0), layout="constrained")
    fill(*numbers, figure, LIGHT)
    return figure


def words(figure: Any) -> list[Any]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def contents(paths: Any) -> dict[Any, Any]:
    return {path.name: path.read_bytes() for path in paths}


def test_the_figure_as_pdf_and_png_with_the_same_bytes_each_time(tmp_path: Path) -> None:
    first, again = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    again.mkdir()
    rows = caps_rows(rates=(150.0, 200.0), patterns=("bursty",))
    paths = caps_figures.draw_figures(first, rows)
    assert [path.name for path in paths] == [f"{caps_figures.NAME}.{kind}" for kind in ("pdf", "png")]
    assert sorted(first.iterdir()) == sorted(paths)
    for name, data in contents(paths).items():
        assert data.startswith(b"%PDF-" if name.endswith("pdf") else b"\x89PNG"), name
        assert b"CreationDate" not in data, name
        assert b"atplotlib" not in data, "another version draws the same"
    # In another order of rates, as a user may give them.
    turned = [row for rate in (200.0, 150.0) for row in rows if row["rate"] == rate]
    assert contents(caps_figures.draw_figures(again, turned)) == contents(paths)


@pytest.mark.parametrize(
    "rows",
    [
        caps_rows(("fcfs", "latency_aware"), (200.0,), half=None, patterns=("bursty",)),
        caps_rows(("fcfs", "best_fit", "a_users_own_strategy_of_long_name"), (150.0, 160.0), known=False),
        caps_rows(("fcfs", "random"), (300.0,), patterns=("bursty",)),
        caps_rows(("fcfs", "power_of_d"), (200.0,), patterns=("poisson",)),
        caps_rows(("fcfs", *"abcdef"), tuple(np.linspace(1.0, 1e4, 12)), patterns=("bursty",)),
    ],
    ids=["one seed", "a user's own", "one published range", "poisson", "many"],
)
def test_any_part_of_the_evaluation_can_be_drawn(rows: list[Any]) -> None:
    """Filled and laid out; the files are the test above."""
    filled(caps_figures._p99_by_rate, rows).draw_without_rendering()


def test_without_a_comparison_nothing_is_drawn(tmp_path: Path) -> None:
    assert caps_figures.draw_figures(tmp_path, caps_rows(("fcfs",), (7.5,))) == caps_figures.draw_figures(tmp_path, [])
    assert list(tmp_path.iterdir()) == []


def test_a_loss_below_the_axis_is_written() -> None:
    rows = caps_rows(("fcfs", "lpt", "random"))
    rows[1] |= {"p99_reduction_pct": -172.4, "p99_reduction_low": -200.0, "p99_reduction_high": -150.0}
    figure = filled(caps_figures._p99_by_rate, rows)
    assert figure.axes[0].get_ylim()[0] == caps_figures.FLOOR
    assert "below the axis\nlpt at 150: −172" in words(figure)
    mild = filled(caps_figures._p99_by_rate, caps_rows(("fcfs", "lpt")))
    assert not any("below the axis" in text for text in words(mild))
    rows[4] |= {"p99_reduction_pct": -80.0}
    assert "below the axis\nlpt at 150: −172, at 200: −80" in words(filled(caps_figures._p99_by_rate, rows))


def test_predicted_rates_are_marked() -> None:
    axes = filled(caps_figures._p99_by_rate, caps_rows(("fcfs", "random"))).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["150", "200*", "250*", "300"]


def test_a_lone_strategy_of_the_group_has_its_own_line() -> None:
    names = ("fcfs", "best_fit", "lpt_balanced")
    assert list(caps_figures.look_of(caps_rows(names))) == ["best_fit", "lpt_balanced"]
    assert set(caps_figures.look_of(caps_rows())) == {"latency_aware", "random", "karmarkar_karp", "lpt"}


def test_no_two_of_twenty_strategies_look_alike() -> None:
    look = caps_figures.styles([f"s{number}" for number in range(20)])
    assert len(set(look.values())) == 20


def regime_row(
    regime: Any, model: Any, arrivals: Any, load: Any, strategy: Any, gain: Any, half: float | None = 0.5
) -> dict[str, Any]:
    low, high = (None, None) if gain is None or half is None else (gain - half, gain + half)
    row = {"regime": regime, "model": model, "arrivals": arrivals, "load": load, "strategy": strategy}
    return row | {"p99_reduction_pct": gain, "p99_reduction_low": low, "p99_reduction_high": high}


@pytest.fixture
def regime_rows() -> list[Any]:
    rng = np.random.default_rng(3)
    models, regimes, arrivals = ("gpt-oss-20b", "deepseek-v2-lite"), ("decode", "ep8-decode"), ("azure", "mooncake")
    return [
        regime_row(regime, model, kind, load, name, 0.0 if name == "fcfs" else float(rng.normal(0, 30)))
        for model, regime, kind, load, name in product(
            models, regimes, arrivals, (0.8, 1.3), ("fcfs", "lpt", "random", "mine")
        )
    ]


def test_regimes_figure_is_deterministic_and_takes_gaps(regime_rows: list[Any], tmp_path: Path) -> None:
    kept = {name: regime_rows[1][name] for name in ("regime", "model", "arrivals", "load", "strategy")}
    regime_rows[1] = regime_row(**kept, gain=None)
    rows = [row for row in regime_rows if (row["model"], row["strategy"]) != ("gpt-oss-20b", "mine")]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = regimes_figures.draw_figures(tmp_path / "a", rows)
    assert [path.suffix for path in first] == [".pdf", ".png"]
    assert contents(first) == contents(regimes_figures.draw_figures(tmp_path / "b", rows))


def test_regimes_without_a_comparison_draw_nothing(regime_rows: list[Any], tmp_path: Path) -> None:
    assert regimes_figures.draw_figures(tmp_path, []) == []
    assert regimes_figures.draw_figures(tmp_path, [row for row in regime_rows if row["strategy"] == "fcfs"]) == []
    one = [row for row in regime_rows if row["strategy"] in ("fcfs", "mine") and row["load"] == 0.8][:2]
    assert len(regimes_figures.draw_figures(tmp_path, one)) == 2


def test_a_cell_is_the_mean_over_arrivals(regime_rows: list[Any]) -> None:
    names, columns = ["lpt", "mine"], [("decode", "gpt-oss-20b"), ("ep8-decode", "deepseek-v2-lite")]
    rows = [row for row in regime_rows if row["strategy"] in names and (row["regime"], row["model"]) in columns]
    found = regimes_figures._matrix(rows, 1.3, names, columns)
    for (at, name), (column, (regime, model)) in product(enumerate(names), enumerate(columns)):
        cell = {"regime": regime, "model": model, "load": 1.3, "strategy": name}
        values = [row["p99_reduction_pct"] for row in regime_rows if cell.items() <= row.items()]
        assert len(values) == 2
        assert found.gain_pct[at, column] == pytest.approx(np.mean(values))


@pytest.mark.parametrize(
    ("gains", "half", "sure", "split"),
    [
        ((5.0, 8.0), 1.0, True, False),
        ((-5.0, -8.0), 1.0, True, False),
        ((5.0, 8.0), 6.0, False, False),
        ((5.0, -8.0), 1.0, False, True),
        ((0.9, 0.8), 0.1, False, False),  # surely above 0, and nothing all the same
        ((5.0, 8.0), None, False, False),  # one seed says nothing of the others
    ],
)
def test_sure_and_split_cells(gains: tuple[float, float], half: float | None, sure: bool, split: bool) -> None:
    rows = [regime_row("decode", "m", kind, 0.8, "s", gain, half) for kind, gain in zip("ab", gains, strict=True)]
    found = regimes_figures._matrix(rows, 0.8, ["s"], [("decode", "m")])
    assert (found.sure[0, 0], found.split[0, 0]) == (sure, split)


def test_colours_are_clipped_and_numbers_are_not() -> None:
    gains = {"a": -172.4, "b": CLIP_PCT + 1.2}
    rows = [regime_row("decode", model, "azure", 0.8, "s", gain) for model, gain in gains.items()]
    columns = [("decode", "a"), ("decode", "b")]
    found = [regimes_figures._matrix(rows, 0.8, ["s"], columns)]
    figure = filled(regimes_figures._fill, found, ["s"], columns)
    assert words(figure)[:2] == ["−172.4", "+31.2"]
    assert figure.axes[0].images[0].get_clim() == (-CLIP_PCT, CLIP_PCT)


def test_help_and_harm_differ_in_lightness_from_nothing_and_in_hue_from_each_other() -> None:
    colors = LinearSegmentedColormap.from_list("c", list(COLORS))(np.linspace(0, 1, 61))[:, :3]
    grey = colors @ [0.3, 0.59, 0.11]
    assert grey[30] == pytest.approx(1.0, abs=0.01)
    assert (np.diff(grey[:31]) > 0).all(), "darker the further from nothing"
    assert (np.diff(grey[30:]) < 0).all()
    # Yellow against blue is what red-green blindness leaves.
    opponent = colors[:, :2].mean(axis=1) - colors[:, 2]
    assert (opponent[:29] > 0.02).all()
    assert (opponent[32:] < -0.02).all()
