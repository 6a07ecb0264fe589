"""Check names before any work, so that a mistyped name fails before the seconds of importing compiled code."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path

from coterie.costs.cells import check_preset
from coterie.errors import UnknownNameError
from coterie.models import get_model

STRATEGIES = (
    "best_fit",
    "differencing",
    "fcfs",
    "greedy_dot_product",
    "greedy_variance",
    "karmarkar_karp",
    "latency_aware",
    "lpt",
    "lpt_balanced",
    "norm_minimizing",
    "power_of_d",
    "power_of_d_dot",
    "random",
)
"""Built-in strategies of :mod:`coterie.batching`."""
PREDICTORS = ("domain", "popularity", "prefix", "recent_popularity", "recorded", "similar_prefix", "token_table")
"""Built-in predictors of :mod:`coterie.predictors`."""
ALL, DRY_RUN = "all", "dry_run"


def check_names(
    strategies: Iterable[str], predictor: str | None, model: str | None, preset: str | None, with_model: bool
) -> None:
    """Raise for a strategy, predictor, model or preset that does not exist."""
    known = _known("coterie.batching", "strategies", STRATEGIES)
    for name in strategies:
        if name not in (*known, ALL):
            raise UnknownNameError("strategy", name, known)
    if predictor is not None:
        known = [*_known("coterie.predictors", "predictors", PREDICTORS), *([DRY_RUN] if with_model else [])]
        if predictor not in known:
            raise UnknownNameError("predictor", predictor, known)
    if model is not None and not Path(model).exists():
        get_model(model)
    if preset is not None:
        check_preset(preset)


def _known(module: str, registry: str, built_in: tuple[str, ...]) -> list[str]:
    """Return all names of a registry. Plugins are listed from entry points, not loaded, unless `module` is imported."""
    loaded = getattr(sys.modules.get(module), registry, None)
    if loaded is not None:
        names: list[str] = loaded.names()
        return names
    return sorted({*built_in, *(point.name for point in entry_points(group=f"coterie.{registry}"))})
