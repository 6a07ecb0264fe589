"""Batches that routing kernels must sort, logits they must choose from, and what they must give, from NumPy alone.

Run as a program, it checks every case on a device with the Triton kernels: on a CPU with TRITON_INTERPRET=1 set.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Case(NamedTuple):
    name: str
    ids: NDArray[np.int64]
    """[token, k]"""
    num_experts: int
    width: int


def distinct(rng: np.random.Generator, tokens: int, k: int, experts: int) -> NDArray[np.int64]:
    """[token, k] distinct experts per token."""
    return np.argsort(rng.random((tokens, experts)), axis=1)[:, :k].astype(np.int64)


def cases(rng: np.random.Generator, largest: int = 700) -> Iterator[Case]:
    """Random and adversarial batches; `largest` bounds their tokens."""
    yield Case("one token", distinct(rng, 1, 8, 256), 256, 48)
    yield Case("one token, k=1, one expert", np.zeros((1, 1), np.int64), 1, 1)
    yield Case("one expert", np.zeros((19, 1), np.int64), 1, 17)
    yield Case("all tokens on the same experts", np.tile(np.array([[3, 0, 7]]), (13, 1)), 8, 20)
    yield Case("all entries on the last expert", np.full((9, 2), 255), 256, 16)
    yield Case("the same expert twice in a token", np.repeat(rng.integers(0, 5, (11, 1)), 4, axis=1), 5, 16)
    yield Case("most experts empty", distinct(rng, 15, 2, 4) * 60, 256, 33)
    yield Case("falling ids", np.sort(rng.integers(0, 100, (17, 4)).ravel())[::-1].reshape(17, 4).copy(), 100, 16)
    yield Case("k=1", distinct(rng, 23, 1, 16), 16, 24)
    yield Case("experts not a power of two", distinct(rng, 21, 6, 60), 60, 40)
    yield Case("256 experts", distinct(rng, 13, 8, 256), 256, 40)
    yield Case("larger", distinct(rng, largest, 8, 256), 256, 24)
    for tokens in (2, 16, 17):
        yield Case(f"{tokens} tokens", distinct(rng, tokens, 4, 32), 32, 100)


class Expected(NamedTuple):
    order: NDArray[np.int64]
    places: NDArray[np.int64]
    counts: NDArray[np.int64]
    ends: NDArray[np.int64]


def expected(case: Case) -> Expected:
    flat = case.ids.ravel()
    order = np.argsort(flat, kind="stable")
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    counts = np.bincount(flat, minlength=case.num_experts)
    return Expected(order, places, counts, np.cumsum(counts))


def check_case(case: Case, device: str, dtype: Any, *, turns: int = 2, **how: Any) -> None:
    """Sort and permute one case, by default twice, against NumPy; raise with its name where anything differs."""
    import torch

    from coterie.engines.kernels.routing import permute_by_expert, sort_by_expert

    want = expected(case)
    ids = torch.from_numpy(case.ids).to(device=device, dtype=dtype)
    hidden = torch.randn(len(case.ids), case.width, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    there = hidden.to(device)
    for turn in range(turns):  # the second must give the same bytes
        for what, routed, rows in (
            ("sort", sort_by_expert(ids, case.num_experts, **how), None),
            ("permute", *permute_by_expert(there, ids, case.num_experts, **how)[::-1]),
        ):
            for name, found, right in zip(want._fields, routed, want, strict=True):
                if not np.array_equal(found.cpu().numpy(), right):
                    raise AssertionError(f"{case.name}, {what}, {how}: {name} differs in turn {turn}")
            if rows is not None:
                right_rows = hidden.double()[torch.from_numpy(want.order // case.ids.shape[1])]
                if not torch.equal(rows.cpu().double(), right_rows):
                    raise AssertionError(f"{case.name}, {what}, {how}: rows differ in turn {turn}")


def routers_logits(rng: np.random.Generator, rows: int, experts: int) -> Iterator[NDArray[np.float32]]:
    """Logits [row, expert] with few, many and only equal values, infinities, both zeros and the smallest numbers."""
    yield rng.normal(size=(rows, experts)).astype(np.float32)
    yield rng.integers(-2, 3, (rows, experts)).astype(np.float32)
    yield rng.choice(np.array([-np.inf, -1e-40, -0.0, 0.0, 1e-40, np.inf], np.float32), (rows, experts))
    yield np.zeros((rows, experts), np.float32)


def first_largest(row: NDArray[np.float32], k: int) -> list[int]:
    """The k largest, largest first; of equal numbers the first; -0.0 is less than 0.0."""
    return sorted(range(len(row)), key=lambda at: (-row[at], np.signbit(row[at]), at))[:k]


def check_top_k(take: Callable[[Any, Any], None], device: str, rows: int) -> None:
    """Check `take(logits, ids)`, which must write ids [row, k] and nothing beside them."""
    import torch

    rng = np.random.default_rng(0)
    for experts, k in ((1, 1), (8, 2), (32, 4), (60, 6), (128, 8), (257, 8)):
        wide = torch.full((rows, 3 * k), 99, dtype=torch.uint8 if experts <= 256 else torch.int16, device=device)
        for logits in routers_logits(rng, rows, experts):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                drawn = torch.from_numpy(logits).to(dtype)
                take(drawn.to(device), wide[:, k : 2 * k])
                want = [[99] * k + first_largest(row, k) + [99] * k for row in drawn.float().numpy()]
                assert wide.tolist() == want, f"{experts} experts, k={k}, {dtype}"


def main(device: str, largest: int) -> None:
    import torch

    from coterie.engines.kernels.routing import Launch
    from coterie.engines.kernels.top_k import top_k_by_triton

    launches = (
        Launch(pairs=True, block=64, warps=1),
        Launch(pairs=False, chunk=64, split=2, block=32, warps=1),
        Launch(pairs=True, block=8192),
        Launch(pairs=False, chunk=256),
    )
    for at, case in enumerate(cases(np.random.default_rng(0), largest)):
        dtype = torch.int64 if at % 2 else torch.int32
        check_case(case, device, dtype, turns=1, backend="triton", launch=launches[at % len(launches)])
    check_top_k(top_k_by_triton, device, largest // 4)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
