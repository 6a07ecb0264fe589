"""The shipped sample is what its script draws from the full recording."""

from __future__ import annotations

from collections import Counter
from importlib.resources import files
from pathlib import Path

import numpy as np

from coterie.traces import ActivationTrace, RequestTrace
from coterie.traces.readers import read_as
from make_sample import REQUESTS, SEED, draw, sample


def test_it_is_made_again(data_dir: Path) -> None:
    trace = read_as(ActivationTrace, data_dir / "activations/gpt-oss-20b")
    made = sample(trace, draw(trace.requests, REQUESTS, np.random.default_rng(SEED)))
    with np.load(str(files("coterie").joinpath("data/samples/gpt-oss-20b.npz"))) as shipped:
        assert set(shipped) == set(made)
        for name, array in made.items():
            np.testing.assert_array_equal(shipped[name], array, err_msg=name)


def test_every_subject_has_its_share(rng: np.random.Generator) -> None:
    subjects = ["law"] * 80 + ["math"] * 40 + ["code"] * 40
    lengths = rng.permutation(160)
    requests = RequestTrace(lengths, lengths, domains=subjects, extra={"dataset": ["d"] * 160})
    chosen = draw(requests, 40, rng)
    assert Counter(subjects[number] for number in chosen) == {"law": 20, "math": 10, "code": 10}
    assert (np.diff(chosen) > 0).all()
