"""The loops of :mod:`coterie.batching.latency_aware` that even out ``1 + sensitivity x CV`` of the load."""

from __future__ import annotations

import numpy as np

from coterie._numba import njit
from coterie.batching.base import Loads
from coterie.batching.greedy import DOT, pick_greedily
from coterie.batching.picking import Indices, allowed_skips, due, in_order, total_of

BY_DOT = np.int64(DOT)
"""A NumPy integer: Numba would compile the picking again for a Python one."""


@njit()
def by_spread(
    loads: Loads, running: Loads, skipped: Indices, expected_gain: float, size: int, max_skips: int, sensitivity: float
) -> tuple[Indices, int, float]:
    arrived = in_order(skipped, size, max_skips)
    if len(arrived) == len(loads):
        return arrived, 0, 0.0
    rows, load = loads.reshape(len(loads), loads.shape[1] * loads.shape[2]), running.ravel()
    time = spread(rows, load, arrived, sensitivity)
    budget = allowed_skips(spread_avoidable(rows, load, arrived, time), expected_gain, max_skips)
    if budget == 0:
        return arrived, 0, 0.0
    order, forced = due(skipped, size, max_skips, budget)
    if forced < len(order):
        # Not the least CV of this batch: over many batches the dot product passes the same requests over least often.
        order = pick_greedily(loads, running, skipped, size, budget, BY_DOT)[0]
    gain = 1.0 - spread(rows, load, order, sensitivity) / time
    return (order, budget, gain) if gain > 0.0 else (arrived, 0, 0.0)


@njit()
def spread_avoidable(rows: Loads, load: Loads, arrived: Indices, time: float) -> float:
    """Share of the time 1 + sensitivity x CV that unevenness costs, divided by the share of the work chosen here."""
    brought = 0.0
    for request in arrived:
        brought += total_of(rows[request])
    if brought <= 0.0:
        return 0.0
    share = brought / (brought + total_of(load))
    return (1.0 - 1.0 / time) / share


@njit(fastmath=True)
def spread(rows: Loads, load: Loads, order: Indices, sensitivity: float) -> float:
    """1 + sensitivity x CV of the load with these requests."""
    batch = load.copy()
    for request in order:
        row = rows[request]
        for column in range(len(batch)):
            batch[column] += row[column]
    square, total = 0.0, 0.0
    for column in range(len(batch)):
        square += batch[column] * batch[column]
        total += batch[column]
    if total <= 0.0:
        return 1.0
    return float(1.0 + sensitivity * np.sqrt(max(0.0, len(batch) * square / (total * total) - 1.0)))
