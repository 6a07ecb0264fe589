from __future__ import annotations

import gzip
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from coterie.engines.worker.metrics import WorkerMetrics
from coterie.gateway.signals.worker_metrics import MOST_SERIES, ReportError, WorkerReport, read_report


def rendered(labels: dict[str, list[str]], **values: list[float]) -> bytes:
    """Gauges as the Prometheus client writes them; `__` in a name is a colon. Labels and values are [engine]."""
    registry = CollectorRegistry()
    for name, each in values.items():
        gauge = Gauge(name.replace("__", ":"), "Some help.", list(labels), registry=registry)
        for number, value in enumerate(each):
            gauge.labels(*(known[number] for known in labels.values())).set(value)
    return generate_latest(registry)


def vllm(running: list[float], waiting: list[float], used: list[float], name: str = "kv_cache_usage_perc") -> bytes:
    labels = {"model_name": ['a "b", engine="9"'] * len(running), "engine": [str(at) for at in range(len(running))]}
    values = {"vllm__num_requests_running": running, "vllm__num_requests_waiting": waiting, f"vllm__{name}": used}
    by_reason = rendered(labels, vllm__num_requests_waiting_by_reason=[99.0] * len(running))
    return by_reason + rendered(labels, **values)


def test_vllm() -> None:
    text = vllm([3, 5], [0, 2], [0.25, 0.75])
    assert read_report(text) == WorkerReport(8, 2, 0.5), "the sum of the requests, the mean of the KV use"
    assert read_report(text, 1) == WorkerReport(5, 2, 0.75)
    assert read_report(vllm([3], [1], [0.5], "gpu_cache_usage_perc")) == WorkerReport(3, 1, 0.5), "older versions"
    with pytest.raises(ReportError, match=r"data_parallel_rank=2 is none of the engines \['0', '1'\]"):
        read_report(text, 2)


def test_sglang() -> None:
    """Four tensor-parallel ranks for each of two data-parallel ones: those of an engine repeat its values."""
    ranks = {"model_name": ["m"] * 8, "tp_rank": list("01230123"), "dp_rank": list("00001111")}
    values = {"sglang__num_running_reqs": [4.0] * 4 + [6.0] * 4, "sglang__num_queue_reqs": [1.0] * 8}
    text = rendered(ranks, **values, sglang__token_usage=[0.1] * 4 + [0.3] * 4)
    assert read_report(text) == WorkerReport(10, 2, (0.1 + 0.3) / 2)
    assert read_report(text, 0) == WorkerReport(4, 1, 0.1)
    alone = b'sglang:num_running_reqs{model_name="m"} 2.0\nsglang:token_usage{model_name="m"} 0.28\n'
    assert read_report(alone) == WorkerReport(2, 0, 0.28)


def test_the_reference_worker() -> None:
    metrics = WorkerMetrics({"model": "tiny", "role": "both"})
    assert read_report(metrics.render()) == WorkerReport(0, 0, 0.0)
    for name, label, value in (
        ("running", "", 3),
        ("waiting", "", 2),
        ("kv_blocks", "used", 10),
        ("kv_blocks", "cached", 20),
        ("kv_blocks", "empty", 10),
    ):
        metrics.set(name, label, value)
    assert read_report(metrics.render()) == WorkerReport(3, 2, 0.25)


def test_a_time_after_the_value_and_a_last_line_without_an_end() -> None:
    assert read_report(b"vllm:num_requests_running 4 1700000000000") == WorkerReport(4, 0, 0.0)


GOOD = vllm([3], [1], [0.5])


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (b"", "unknown"),
        (b"<html>vllm:num_requests_running 3</html>", "unknown"),
        (gzip.compress(GOOD), "unknown"),
        (b"vllm:num_requests_running_in_all 3\n", "unknown"),
        (b'vllm:num_requests_running{engine="0" 3\n', "malformed"),
        (b"vllm:num_requests_running many\n", "malformed"),
        (b"vllm:num_requests_running \n", "malformed"),
        (b"vllm:num_requests_running{" + b"a" * 1_000_000 + b"} 3\n", "malformed"),
        (b"vllm:num_requests_running 3\n" * MOST_SERIES, "malformed"),
        *(
            (GOOD.replace(b" 3.0", value), "impossible")
            for value in (b" NaN", b" -1", b" 1e308", b" Inf", b" -inf", b" 9e99999")
        ),
        *((GOOD.replace(b" 0.5", value), "impossible") for value in (b" NaN", b" -0.1", b" 1.01", b" 50.0")),
        (GOOD.replace(b" 1.0", b" -1"), "impossible"),
    ],
)
def test_what_cannot_be_is_named(text: bytes, kind: str) -> None:
    with pytest.raises(ReportError) as caught:
        read_report(text)
    assert caught.value.kind == kind
    assert len(str(caught.value)) < 300


@given(st.binary(max_size=200), st.integers(0, 400))
def test_anything_is_read_or_refused(noise: bytes, at: int) -> None:
    for text in (noise, GOOD[:at] + noise + GOOD[at:], GOOD[:at] + noise):
        try:
            report = read_report(text)
        except ReportError:
            continue
        assert 0 <= report.running <= 1 << 21
        assert 0 <= report.kv_used <= 1


@pytest.mark.parametrize(
    "text",
    [
        b"\nvllm:num_requests_running" * 80_000,
        b"\nvllm:num_requests_running 1" * 80_000,
        b"vllm:num_requests_running{" + b"a" * (2 << 20),
        b"\nvllm:num_requests_running{" * 80_000,
        b"\n".join([b"vllm:num_requests_running{" + b"a" * 4000 + b"} 1"] * 500),
        b"\n".join([b"vllm:num_requests_running{" + b',engine="' * 400 + b"} 1"] * 500),
        b"\n".join([b"vllm:num_requests_running{" + b"} " * 2000] * 500),
        b"\n" * (2 << 20),
    ],
)
def test_the_time_of_reading_is_linear_in_the_size(text: bytes) -> None:
    """2 MiB take some milliseconds; quadratic time would be minutes."""
    began = time.process_time()
    with suppress(ReportError):
        read_report(text)
    assert time.process_time() - began < 10
