"""Small activation traces, and what makes two of them equal."""

from __future__ import annotations

import numpy as np

from coterie.traces import ActivationTrace, RequestTrace, TraceMeta

META = TraceMeta("demo", num_experts=300, num_layers=2, top_k=3, layer_ids=(1, 3), source={"file": "x"}, block_tokens=4)


def make(
    rng: np.random.Generator, lengths: list[int], optional: bool = True, meta: TraceMeta = META
) -> ActivationTrace:
    count, offsets = sum(lengths), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    shape = (count, meta.num_layers, meta.top_k)
    requests = RequestTrace(
        prompt_tokens=rng.integers(0, 9, len(lengths)),
        output_tokens=rng.integers(0, 9, len(lengths)),
        arrival_s=np.sort(rng.random(len(lengths))),
        ids=[f"r{i}" for i in range(len(lengths))],
        domains=[str(rng.choice(["law", "math"])) for _ in lengths],
        prefix_blocks=[rng.integers(-(2**60), 2**60, int(rng.integers(0, 4))) for _ in lengths],
        block_tokens=4,
        extra={"note": [i * 0.5 for i in range(len(lengths))]},
        source={"file": "x"},
    )
    return ActivationTrace.from_arrays(
        meta,
        rng.integers(0, meta.num_experts, shape),
        offsets,
        requests,
        rng.integers(0, 2, count).astype(np.uint8),
        rng.integers(0, 2**31 - 1, count).astype(np.int32) if optional else None,
        rng.random(shape).astype(np.float16) if optional else None,
    )


def assert_same(found: ActivationTrace, expected: ActivationTrace) -> None:
    assert found.meta == expected.meta
    for mine, theirs in zip(found.arrays()[0], expected.arrays()[0], strict=True):
        if theirs is None:
            assert mine is None
        else:
            assert mine is not None
            assert mine.dtype == theirs.dtype
            assert mine.tobytes() == theirs.tobytes()
    np.testing.assert_array_equal(found.arrays()[1], expected.arrays()[1])
    assert_same_requests(found.requests, expected.requests)


def assert_same_requests(found: RequestTrace, expected: RequestTrace) -> None:
    np.testing.assert_array_equal(found.prompt_tokens, expected.prompt_tokens)
    np.testing.assert_array_equal(found.output_tokens, expected.output_tokens)
    np.testing.assert_array_equal(found.arrival_s, expected.arrival_s)
    assert found.ids == expected.ids
    assert found.domains == expected.domains
    assert found.block_tokens == expected.block_tokens
    assert dict(found.extra) == dict(expected.extra)
    assert found.prefix_blocks is not None
    assert expected.prefix_blocks is not None
    for mine, theirs in zip(found.prefix_blocks, expected.prefix_blocks, strict=True):
        np.testing.assert_array_equal(mine, theirs)
