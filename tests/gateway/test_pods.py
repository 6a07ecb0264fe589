"""Workers that are pods: who joins, who leaves, and what an API server that fails changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from canned_workers import Canned, canned_workers
from coterie.errors import ConfigError
from coterie.gateway.config import PodSection
from coterie.net.http1.messages import HttpRequest
from coterie.net.http1.responder import Responder
from gateway_runs import config_of, gateway, run
from http1_peers import until


def pod(name: str, role: str | None = "decode", **status: Any) -> dict[str, Any]:
    labels = {} if role is None else {"llm-d.ai/role": role}
    return {
        "metadata": {"name": name, "labels": labels},
        "status": {"phase": "Running", "podIP": "127.0.0.1", **status},
    }


def test_pods_join_and_leave() -> None:
    async def test() -> None:
        pods: list[dict[str, Any]] = []
        status = 200

        async def lists(_: Canned, __: HttpRequest, responder: Responder) -> None:
            responder.send(status, msgspec.json.encode({"items": pods}))

        async with canned_workers("api", "w", api=lists) as (api, worker):
            port = int(worker.url.rpartition(":")[2])
            section = PodSection(selector="app=vllm", port=port, namespace="ns", api=api.url, every_s=0.001)
            async with gateway(config_of([], handshake="vllm", pods=section)) as found:
                parts = found.running.parts

                def roles() -> dict[str, str]:
                    return {entry.id: entry.role for entry in parts.entries()}

                pods[:] = [
                    pod("a"),
                    pod("b", "prefill"),
                    pod("c", None),
                    pod("starting", phase="Pending"),
                    pod("new", podIP=""),
                ]
                pods.append(pod("ends"))
                pods[-1]["metadata"]["deletionTimestamp"] = "2026-11-19T00:00:00Z"
                await until(lambda: roles() == {"a": "decode", "b": "prefill", "c": "both"})
                assert parts.entries()[0].url == f"http://127.0.0.1:{port}"
                assert api.asked[-1].path == "/api/v1/namespaces/ns/pods"
                told = (await found.client.ask("GET", "/requests")).json["workers"]
                assert [entry["id"] for entry in told] == ["a", "c", "b"], "coterie advise sees them"
                pods[:] = [pod("b", "prefill"), pod("d")]
                await until(lambda: roles() == {"b": "prefill", "d": "decode"})
                status = 403
                before = len(api.asked)
                await until(lambda: len(api.asked) > before + 3)
                assert roles() == {"b": "prefill", "d": "decode"}
                assert found.logged().count('"pods: HTTP 403') == 1

    run(test)


def test_a_pod_that_cannot_join_keeps_no_other_from_it_and_a_reload_none_from_staying(tmp_path: Path) -> None:
    async def test() -> None:
        answers = [msgspec.json.encode({"items": [pod("p", "prefill"), pod("a")]})]

        async def lists(_: Canned, __: HttpRequest, responder: Responder) -> None:
            responder.send(200, answers[-1])

        async with canned_workers("api", "w", api=lists) as (api, worker):
            port = int(worker.url.rpartition(":")[2])
            section = PodSection(selector="app=vllm", port=port, namespace="ns", api=api.url, every_s=0.001)
            config, path = config_of([], pods=section), tmp_path / "gateway.yaml"
            path.write_bytes(msgspec.json.encode(config))
            async with gateway(config, path) as found:
                await until(lambda: found.open("decode") == {"a"})
                joined = found.running.parts.pools["decode"].members["a"]
                answers.append(b'{"items": [{"metadata": {"name": "\xff"}, "status": {}}]}')
                before = len(api.asked)
                await until(lambda: len(api.asked) > before + 3)
                await found.running.reload()
                assert found.running.parts.pools["decode"].members == {"a": joined}
                answers.append(msgspec.json.encode({"items": []}))
                await until(lambda: not found.running.parts.entries())
                logged = found.logged()
                assert "handshake" in logged
                assert "utf-8" in logged

    run(test)


def test_a_pod_takes_the_id_of_no_other_worker() -> None:
    """Neither that of the config, also after its removal, nor that of one added later; the reason is logged once."""

    async def test() -> None:
        async def lists(_: Canned, __: HttpRequest, responder: Responder) -> None:
            responder.send(200, msgspec.json.encode({"items": [pod("a"), pod("b"), pod("c")]}))

        async with canned_workers("a", "b", "api", api=lists) as (a, b, api):
            section = PodSection(selector="app=vllm", port=1, namespace="ns", api=api.url, every_s=0.001)
            async with gateway(config_of([a], pods=section)) as found:
                ask, parts = found.client.ask, found.running.parts

                def urls() -> dict[str, str]:
                    return {entry.id: entry.url for entry in parts.entries()}

                async def looked_again() -> None:
                    before = len(api.asked)
                    await until(lambda: len(api.asked) > before + 3)

                await until(lambda: len(parts.entries()) == 3)
                assert urls() == {"a": a.url, "b": "http://127.0.0.1:1", "c": "http://127.0.0.1:1"}
                assert (await ask("POST", "/workers", {"id": "b", "url": b.url})).status == 200
                await looked_again()
                assert urls() == {"a": a.url, "b": b.url, "c": "http://127.0.0.1:1"}
                assert (await ask("DELETE", "/workers/a")).status == 200
                await looked_again()
                assert urls() == {"b": b.url, "c": "http://127.0.0.1:1"}
                said = "pods: pod '{}' cannot join: a worker that is no pod has this id"
                logged = found.logged()
                assert logged.count(said.format("a")) == 1
                assert said.format("c") not in logged

    run(test)


@pytest.mark.parametrize(
    "wrong", [{"selector": " "}, {"port": 70_000}, {"kv_events_port": 0}, {"api": "host:1"}, {"every_s": 0.0}]
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PodSection(**{"selector": "app=vllm", **wrong})


def test_outside_of_a_cluster_the_api_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    async def test() -> None:
        with pytest.raises(ConfigError, match="api"):
            async with gateway(config_of([], pods=PodSection(selector="app=vllm", namespace="ns"))):
                pass

    run(test)
