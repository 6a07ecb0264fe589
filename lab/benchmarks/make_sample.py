"""Make the shipped sample again from the full recording of gpt-oss-20b.

    python lab/benchmarks/make_sample.py $COTERIE_DATA/activations/gpt-oss-20b OUT.npz

The sample keeps of each request its experts, its lengths and the name of its subject; no token, text or gate weight.
Requests are drawn systematically: sorted by subject, data set and length, one in four from a random start, so that
each subject, set and length has its share. No seed but this one was tried.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.traces import ActivationTrace, RequestTrace
from coterie.traces.readers import read_as

REQUESTS = 100
SEED = 0


def draw(requests: RequestTrace, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return the numbers of `count` requests, in the order of the recording."""
    columns = zip(requests.domains or [], requests.extra["dataset"], requests.output_tokens.tolist(), strict=True)
    keys = list(columns)
    order = sorted(range(len(keys)), key=keys.__getitem__)
    places = ((np.arange(count) + rng.random()) * len(order) / count).astype(np.int64)
    return np.sort(np.array(order)[places])


def sample(trace: ActivationTrace, chosen: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Return the arrays of the chosen requests, in the layout of the reader ``npz``."""
    requests = trace.requests.take(chosen)
    return {
        "expert_ids": np.concatenate([trace.request(int(number)).expert_ids for number in chosen]),
        "offsets": np.concatenate([[0], np.cumsum(trace.lengths[chosen])]),
        "num_experts": np.array(trace.meta.num_experts),
        "layer_ids": np.array(trace.meta.layer_ids),
        "prompt_tokens": requests.prompt_tokens,
        "output_tokens": requests.output_tokens,
        "domains": np.array(requests.domains),
    }


def main() -> None:
    source, out = (Path(word) for word in sys.argv[1:])
    trace = read_as(ActivationTrace, source)
    chosen = draw(trace.requests, REQUESTS, np.random.default_rng(SEED))
    np.savez_compressed(out, allow_pickle=False, **sample(trace, chosen))
    print(f"{out}: {len(chosen)} of {trace.num_requests} requests, {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
