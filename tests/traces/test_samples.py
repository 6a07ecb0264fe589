"""The recording that comes with the package: opened by name, and numbers only."""

from __future__ import annotations

import zipfile
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie.errors import UnknownNameError
from coterie.traces import ActivationTrace
from coterie.traces.readers import detect, trace_path

SAMPLE = "sample:gpt-oss-20b"
FILE = Path(str(files("coterie").joinpath("data/samples/gpt-oss-20b.npz")))
NUMBERS = {"expert_ids", "offsets", "num_experts", "layer_ids", "prompt_tokens", "output_tokens"}


def test_it_opens_by_name() -> None:
    trace = coterie.open_trace(SAMPLE)
    assert isinstance(trace, ActivationTrace)
    assert (trace.meta.model, trace.num_requests, trace.num_tokens) == ("gpt-oss-20b", 100, 31_387)
    assert (trace.meta.num_layers, trace.meta.num_experts, trace.meta.top_k) == (24, 32, 4)
    trace.validate()
    experts = np.sort(trace.arrays()[0].expert_ids, axis=2)
    assert (np.diff(experts, axis=2) > 0).all(), "a token's experts differ from each other"
    np.testing.assert_array_equal(trace.requests.output_tokens, trace.lengths + 1)
    assert trace.requests.prompt_tokens.min() > 0
    assert detect(Path(SAMPLE)) == "npz"


def test_it_holds_no_text_and_no_token_ids() -> None:
    with zipfile.ZipFile(FILE) as archive:
        assert {name.removesuffix(".npy") for name in archive.namelist()} == {*NUMBERS, "domains"}
    with np.load(FILE, allow_pickle=False) as arrays:
        assert all(arrays[name].dtype.kind in "ui" for name in NUMBERS)
        subjects = set(arrays["domains"].tolist())
    assert max(map(len, subjects)) <= 40
    assert len(subjects) > 50, "many subjects, as in the full recording"
    assert FILE.stat().st_size < 2_000_000


def test_another_path_stays_as_it_is_and_an_unknown_name_is_suggested() -> None:
    assert trace_path("folder/sample:x") == Path("folder/sample:x")
    with pytest.raises(UnknownNameError, match=r"Unknown sample 'sample:gptoss'. Did you mean 'sample:gpt-oss-20b'\?"):
        coterie.open_trace("sample:gptoss")
