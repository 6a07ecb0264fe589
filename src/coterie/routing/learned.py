"""Fitted values of a router: checked, quantised where they are large, and repeated for a larger fleet."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.errors import ConfigError, check, check_not_negative, check_within
from coterie.footprints.signatures import Counts, Signature
from coterie.routing.forecast import DecodeForecast

SCALE = np.float32(255.0)
"""Fixed-point scale: 255 stands for 1."""


@njit(fastmath=True)
def products(
    rows: NDArray[np.uint8] | NDArray[np.float32], vector: NDArray[np.float32], out: NDArray[np.float32]
) -> None:
    """Compute out[row] = row · vector without rescaling; four rows share each read of the vector.

    Rows of a fleet are kept in 8 bits, 0 … 255 for numbers in 0 … 1: a product takes as long as its reads from memory,
    and 8 bits are a quarter of 32. Over thousands of expert indices the relative error of a product is about
    1e-4, far less than the differences between workers.
    """
    count, size = rows.shape
    whole = count - count % 4
    for row in range(0, whole, 4):
        a, b, c, d = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
        for index in range(size):
            value = vector[index]
            a += np.float32(rows[row, index]) * value
            b += np.float32(rows[row + 1, index]) * value
            c += np.float32(rows[row + 2, index]) * value
            d += np.float32(rows[row + 3, index]) * value
        out[row], out[row + 1], out[row + 2], out[row + 3] = a, b, c, d
    for row in range(whole, count):
        a = np.float32(0.0)
        for index in range(size):
            a += np.float32(rows[row, index]) * vector[index]
        out[row] = a


NARROW_BYTES = 1 << 20
"""Centroids above this size are kept in 8 bits: reading them dominates the time of a similarity."""
WIDE = 32767.0
"""Fixed-point scale of a 16-bit signature. Its inner product with an 8-bit row fits in 32 bits, bounded by the
product of both lengths."""
SLACK = 1e-3
"""Relative slack for rounding errors of sums in 32 bits."""


class Learned(NamedTuple):
    """Fitted values of a :class:`RouterFit`."""

    model: str
    """Name of the model whose routing was learned."""
    num_layers: int
    num_experts: int
    shape: tuple[int, ...]
    """Shape of a footprint: (layers, experts)."""
    top_k: int
    signature: Signature
    centroids: NDArray[np.float32]
    """[worker, index in kept layers] mean signatures, of length 1."""
    profiles: NDArray[np.float32]
    """[worker, expert index] mean activation probabilities in decode."""
    forecast: DecodeForecast
    shares: NDArray[np.float32]
    """[worker] share of calibration requests in the worker's union-minimising cluster."""
    narrow: NDArray[np.int8] | None
    """[worker, index in kept layers] centroids in 8 bits; None if they are at most `NARROW_BYTES` large."""
    scales: NDArray[np.float32] | None
    """[worker] factor from products with `narrow` to similarities; None without it."""
    seen: NDArray[np.uint64] | None
    """Digests of the calibration requests, ascending; None if the file does not have them."""

    @classmethod
    def of(
        cls,
        *,
        model: str,
        num_layers: int,
        num_experts: int,
        top_k: int,
        signature: Signature,
        centroids: NDArray[np.float32],
        profiles: NDArray[np.float32],
        forecast: DecodeForecast,
        shares: NDArray[np.float32],
        seen: NDArray[np.uint64] | None = None,
    ) -> Learned:
        """Check the values, and quantise large centroids."""
        size, workers = num_layers * num_experts, len(centroids)
        expected = {
            "signature.weights": (signature.weights.shape, (num_layers, num_experts)),
            "centroids": (centroids.shape, (workers, signature.size)),
            "profiles": (profiles.shape, (workers, size)),
            "forecast.after": (forecast.map.after.shape, (size,)),
            "shares": (shares.shape, (workers,)),
        }
        for name, (shape, right) in expected.items():
            check(shape == right, f"{name} has shape {shape}; it must be {right}")
        check_within(1, num_experts, top_k=top_k)
        for name, array in (("centroids", centroids), ("profiles", profiles), ("shares", shares)):
            check(np.isfinite(array).all(), f"{name} must be finite")
        narrow = scales = None
        if centroids.nbytes > NARROW_BYTES:
            scales = np.abs(centroids).max(axis=1) / 127
            scales = np.where(scales > 0, scales, 1.0).astype(np.float32)
            narrow = np.round(centroids / scales[:, None]).astype(np.int8)
            scales = scales / np.float32(WIDE)
        return cls(
            model=model,
            num_layers=num_layers,
            num_experts=num_experts,
            shape=(num_layers, num_experts),
            top_k=top_k,
            signature=signature,
            centroids=centroids,
            profiles=profiles,
            forecast=forecast,
            shares=shares,
            narrow=narrow,
            scales=scales,
            seen=None if seen is None else np.sort(seen),
        )

    def changed(self, **values: Any) -> Learned:
        """Return a copy with these values replaced; they are checked as in :meth:`of`."""
        derived = ("shape", "narrow", "scales")
        return Learned.of(**{name: kept for name, kept in self._asdict().items() if name not in derived} | values)

    def of_shape(self, footprint: Counts) -> Learned:
        """Return these values; raise ConfigError for a footprint of another model's shape."""
        if footprint.shape != self.shape:
            raise ConfigError(f"footprint has shape {footprint.shape}; {self.model} was fitted for {self.shape}")
        return self

    def read(self, footprint: Counts) -> tuple[NDArray[np.float32], float]:
        """Return a footprint's counts as the forecast reads them, and its number of tokens."""
        profile, total = self.forecast.read(footprint)
        return profile, total / (self.num_layers * self.top_k)

    def rows_for(self, workers: int) -> NDArray[np.int64]:
        """Return [worker] the row of each worker of a larger fleet; each new one takes the largest share per worker."""
        rows, count = list(range(len(self.shares))), np.ones(len(self.shares))
        while len(rows) < workers:
            rows.append(int(np.argmax(self.shares / count)))
            count[rows[-1]] += 1
        return np.array(rows, np.int64)

    def similarities(self, own: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return [worker] the cosine of a request's signature `own` with each centroid."""
        out = np.empty(len(self.centroids), np.float32)
        if self.narrow is None or self.scales is None:
            products(self.centroids, own, out)
        else:
            _narrow_similarities(self.narrow, self.scales, np.asarray(own * WIDE, np.int16), out)
        return out


def check_ranges(learned: Learned) -> None:
    """Raise ConfigError for values that no fit gives; a router would use them without an error."""
    forecast = learned.forecast.map
    means = np.stack([forecast.before, forecast.after]).sum(axis=1, dtype=np.float64)
    per_token = float(learned.top_k * learned.num_layers)
    for name, array, most in (("profiles", learned.profiles, learned.top_k), ("shares", learned.shares, 1)):
        low, high = float(array.min()), float(array.max())
        check(
            low >= 0 and high <= most * (1 + SLACK),
            f"{name} hold {low if low < 0 else high:g}; they must be in 0 … {most}",
        )
    lengths = np.linalg.norm(learned.centroids.astype(np.float64), axis=1)
    sums = learned.profiles.sum(axis=1, dtype=np.float64)
    for name, values, right in (
        ("lengths of centroids", lengths, 1.0),
        ("sums of profiles over experts and layers", sums, per_token),
        ("sums of before and after over experts and layers", means, per_token),
        ("sum of shares", learned.shares.sum(dtype=np.float64, keepdims=True), 1.0),
    ):
        off = np.where(values == 0, 0.0, np.abs(values / right - 1))  # a worker without requests has 0
        check(off.max() <= SLACK, f"{name} must be {right:g}; found {values[off.argmax()]:g}")
    check_not_negative(own=forecast.own, noise=forecast.noise, ridge=forecast.ridge)


@njit(fastmath=True)
def _narrow_similarities(
    rows: NDArray[np.int8], scales: NDArray[np.float32], own: NDArray[np.int16], out: NDArray[np.float32]
) -> None:
    for worker in range(rows.shape[0]):
        total = np.int32(0)
        for index in range(rows.shape[1]):  # casts keep Numba from widening to 64 bits, which is not vectorised
            total = np.int32(total + np.int32(np.int32(rows[worker, index]) * np.int32(own[index])))
        out[worker] = total * scales[worker]
