"""What padding.py does without a GPU: graph sizes, and the buffers that a captured graph reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu import padding


def test_graph_sizes_of_a_batch() -> None:
    assert [padding.default_size(rows) for rows in (1, 3, 5, 9, 17, 64)] == [1, 4, 8, 16, 24, 64]
    default, single = padding.pad_table(True), padding.pad_table(False)
    assert (default[9], single[9], len(default)) == (16, 9, padding.MOST + 1)


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("torch")
    monkeypatch.setattr(padding, "DEVICE", "cpu")
    ids = np.random.default_rng(0).random((64, 3, 8)).argsort(axis=2)[:, :, :2]
    return padding.Hooks({"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3}, ids)


@pytest.mark.torch
@pytest.mark.parametrize("variant", padding.VARIANTS)
def test_rows_take_recorded_experts_and_the_mask_covers_padding_rows(hooks: Any, variant: str) -> None:
    import torch

    own, runners, at = torch.randn(16, 8), [object() for _ in range(3)], torch.arange(40, 56)
    for runner in runners:
        torch.testing.assert_close(hooks.route(runner, own), own)
    hooks.step = padding.Step(0, variant, at)
    hooks.before(9, 16)
    chosen = torch.stack([hooks.route(runner, own) for runner in runners]).topk(2).indices.sort().values
    recorded = hooks.ids[at].transpose(0, 1).sort().values  # [layer, row, k]
    assert torch.equal(chosen, recorded)
    assert bool(hooks.skip[9:16].all()) == (variant == "mask")
    assert int(hooks.counts[16, 0]) == (9 if variant == "mask" else 16)
    hooks.step = None
    hooks.before(9, 16)
    torch.testing.assert_close(hooks.route(runners[0], own), own)
    assert not hooks.skip.any()
    assert int(hooks.counts[16, 0]) == 16


@pytest.mark.torch
def test_a_summary_counts_experts_that_only_padding_rows_touch() -> None:
    torch = pytest.importorskip("torch")
    chosen = torch.tensor([[[0, 1], [1, 2], [2, 5], [2, 5]], [[3, 4], [3, 4], [3, 4], [4, 3]]])
    seen = padding.Seen(padding.Step(0, "stale", None), 2, 4, chosen, None, None, None)
    row = padding.summary([seen])
    assert (row["distinct"], row["further"], row["patterns_of_padding"]) == (2.5, 0.5, 1.0)
