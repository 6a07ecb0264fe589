"""An engine's settings of its waiting list, the loads of its requests, and what a device decides."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from coterie.batching.waiting import WaitingList
from coterie.engines.waiting_settings import LoadSource, OrderingSettings, step_cost
from coterie.errors import ConfigError, InputError, UnknownNameError
from coterie.predictors import TokenTable
from coterie.traces import ActivationTrace, TraceMeta
from coterie.types import Placement
from coterie.wire.footprints import WireFootprint
from waiting_engine import EXPERTS, LAYERS, Engine, Request


def test_settings_that_are_wrong_are_one_line() -> None:
    for found, words in (
        ({"strategy": "lpt", "windows": 3}, "windows.*settings: strategy, options, window_size"),
        ({}, "strategy"),
        ({"strategy": "lpt", "window_size": 0}, "window_size=0 must be at least 1"),
        ({"strategy": "lpt", "max_skips": 0}, "max_skips=0"),
        ({"strategy": "lpt", "min_batch_trigger": 0}, "min_batch_trigger=0 must be at least 1"),
        ({"strategy": "lpt", "scheduling_interval_ms": -1}, "scheduling_interval_ms=-1"),
        ({"strategy": "lpt", "phase": "both"}, "phase"),
        ("lpt", "object"),
    ):
        with pytest.raises(ConfigError, match=words) as raised:
            OrderingSettings.parse(found, "here")
        assert "\n" not in str(raised.value)
        assert str(raised.value).startswith("here: ")
    with pytest.raises(UnknownNameError, match="greedy_variance"):
        OrderingSettings(strategy="greedy_varianc").make()
    with pytest.raises(ConfigError, match="options"):
        OrderingSettings(strategy="lpt", options={"d": 3}).make()
    assert getattr(OrderingSettings(strategy="power_of_d", options={"d": 3}).make(), "d") == 3  # noqa: B009


QWEN3 = {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}


def test_a_device_decides_whether_like_or_unlike_requests_go_together() -> None:
    """Two kinds of request in turn. On one H200 a decode batch of one kind streams fewer experts; without a device,
    and across ranks that each hold one kind's experts, the even batch is the better."""

    class Kinds(Engine):
        def share(self, request: Request) -> np.ndarray | None:
            load = np.zeros((48, 128))
            start = 64 * (request.number % 2)
            load[:, start : start + 16] = 0.5
            return load

    for device, ranks, alike in (("h200", 1, True), (None, 1, False), ("h200", 2, False)):
        how = OrderingSettings(strategy="latency_aware", device=device, batch_size=8)
        cost = None if device is None else step_cost(device, "decode", QWEN3, 8, ranks)
        chooser = how.chooser(Kinds(places=8), (48, 128), cost)
        waiting = WaitingList(chooser)
        for number in range(256):
            waiting.push(Request(number))
        odd = sum(waiting.pop().number % 2 for _ in range(8))
        assert (odd == 0) is alike, (device, ranks)
        assert alike or odd == 4
        assert chooser.counters.failures == 0
    with pytest.raises(ConfigError, match="device='h200': strategy 'lpt' does not price steps"):
        OrderingSettings(strategy="lpt", device="h200").make(step_cost("h200", "decode", QWEN3, 8))
    assert step_cost("h200", "prefill", QWEN3, 8).by_tokens


def table() -> TokenTable:
    ids = np.random.default_rng(0).integers(0, EXPERTS // 2, (50, LAYERS, 2))
    ids[..., 1] += EXPERTS // 2  # top-2, different
    meta = TraceMeta("test", EXPERTS, LAYERS, 2, (1, 3))
    trace = ActivationTrace.from_arrays(meta, ids, np.array([0, 50]), token_ids=np.arange(50, dtype=np.int32))
    return TokenTable(smoothing=0.0).fit(trace)


def test_a_map_of_the_layers_that_route_becomes_one_of_the_loads_layers() -> None:
    """DeepSeek-like: layer 0 is dense. Loads have a row for it, or are a table's, of the layers that route."""
    rng = np.random.default_rng(3)
    reported = Placement(rng.permuted(np.tile(np.arange(8), (3, 1)), axis=1).astype(np.int32), 2, 8)
    load = rng.random((3, 8))
    for source, layers in ((LoadSource(None, 4, 8), [1, 2, 3]), (LoadSource(None, 3, 8), [0, 1, 2])):
        cost = step_cost("h200", "decode", QWEN3, 8, 2, source.placement(reported, (1, 2, 3)))
        shown = np.zeros(source.shape)
        shown[layers] = load
        by_rank = cost.slot_loads(shown).reshape(len(shown), 2, -1).sum(axis=2)
        np.testing.assert_allclose(by_rank[layers], reported.rank_load(load))
        assert not np.delete(by_rank, layers, axis=0).any()
    with pytest.raises(InputError, match="it has 8 experts in 3 layers; expected 16 in 3"):
        LoadSource(None, 3, 16).placement(reported, (1, 2, 3))
    with pytest.raises(InputError, match="expected 8 in 0"):
        LoadSource(None, 3, 8).placement(reported, ())


def test_shares_from_table_and_footprint() -> None:
    source = LoadSource(table())
    predicted = source.share([4, 4, 9], None)
    assert predicted is not None
    np.testing.assert_allclose(predicted.sum(axis=1), 2.0)  # top-2 of one token
    counts = np.zeros((1, EXPERTS), np.uint32)
    counts[0, 5] = 6
    both = source.share([4, 4, 9], WireFootprint(counts, (3,), 3))
    assert both is not None
    np.testing.assert_allclose(both[0], predicted[0])
    np.testing.assert_allclose(both[1], np.minimum(counts[0] / 3, 1.0))  # 6 of 3 tokens cannot be
    assert source.share(None, None) is not None, "popularity"
    with pytest.raises(InputError, match="experts"):
        source.share([1], WireFootprint(np.ones((1, 4), np.uint32), (3,), 3))
    bare = LoadSource.open(None, 4, EXPERTS)
    assert bare.share([1, 2], None) is None
    alone = bare.share(None, WireFootprint(counts, (3,), 12))
    assert alone is not None
    np.testing.assert_allclose(alone[3], counts[0] / 12)
    assert not alone[:3].any()
    assert bare.share(None, WireFootprint(counts, (3,), 0)) is None


def test_settings_reach_the_list(tmp_path: Path) -> None:
    """The window, the size, the strategy's own options, the seed and the file of decisions."""
    file = tmp_path / "decisions.jsonl"
    how = OrderingSettings(
        strategy="power_of_d", options={"d": 3}, window_size=5, batch_size=2, max_skips=4, decisions=str(file)
    )
    engine = Engine(places=1)
    chooser = how.chooser(engine)
    waiting = WaitingList(chooser)
    for number in range(9):
        waiting.push(Request(number))
    waiting.pop()
    (line,) = map(json.loads, file.read_text().splitlines())
    assert (len(line["window"]), line["queued"], line["size"], len(line["order"])) == (5, 9, 2, 2)
    assert (chooser.strategy.max_skips, chooser.strict, chooser.report) == (4, False, engine.report)
    with pytest.raises(ConfigError, match=r"^decisions='.*no/file': cannot be written: "):
        OrderingSettings(strategy="lpt", decisions=str(tmp_path / "no" / "file")).chooser(engine)
