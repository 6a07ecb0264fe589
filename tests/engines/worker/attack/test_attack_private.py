"""What only the fleet may read: KV, metrics and steps; and what only a tenant may find in the cache."""

from __future__ import annotations

import asyncio
import re
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from attacked_worker import KEY, SECRET, Attacked, attacked
from coterie.engines.tiny import tiny_model_path
from coterie.engines.worker.config import WorkerConfig
from coterie.errors import ConfigError

PROMPT = list(range(40, 75))
PRIVATE = [
    ("GET", "/kv/abc"),
    ("DELETE", "/kv/abc"),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/steps"),
    ("GET", "/steps?after=0"),
    ("GET", "/metrics"),
]
OPEN = [("GET", "/health"), ("GET", "/v1/models")]


def bearer(key: str) -> dict[str, Any]:
    return {"authorization": f"Bearer {key}"}


def test_private_endpoints_need_the_key() -> None:
    wrong: list[dict[str, Any]] = [
        {},
        bearer("guess"),
        bearer(KEY[:-1]),
        bearer(KEY + "x"),
        bearer(""),
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"authorization": "Bearer \xff"},
    ]

    async def run() -> None:
        async with attacked(fleet_secret=SECRET, worker_key=KEY) as worker:
            for method, path in PRIVATE:
                for headers in wrong:
                    reply = await worker.ask(method, path, **headers)
                    assert (method, path, reply.status) == (method, path, 401)
                    assert reply.headers["www-authenticate"] == "Bearer"
                    assert KEY not in reply.body.decode()
                assert (await worker.ask(method, path, **bearer(KEY))).status in (200, 404)
            for method, path in OPEN:
                assert (await worker.ask(method, path)).status == 200
            assert (await worker.complete(PROMPT, 2)).status == 200

    asyncio.run(run())


def test_on_this_machine_a_worker_without_a_key_is_open() -> None:
    async def run() -> None:
        async with attacked() as worker:
            for method, path in (*PRIVATE, *OPEN):
                assert (await worker.ask(method, path)).status in (200, 404)

    asyncio.run(run())


def peers_of(*others: Attacked, **settings: Any) -> AbstractAsyncContextManager[Attacked]:
    """A worker that may fetch from others."""
    return attacked(2, peers=tuple(f"127.0.0.1:{other.port}" for other in others), **settings)


async def _handed_over(worker: Attacked, **more: Any) -> dict[str, Any]:
    hand_over = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    params: dict[str, Any] = (await worker.complete(PROMPT, 1, **hand_over, **more)).json["kv_transfer_params"]
    return params


ENGINES = [pytest.param(False, id="numpy"), pytest.param(True, id="torch", marks=pytest.mark.torch)]


@pytest.mark.parametrize("torch", ENGINES)
def test_a_handoff_works_once_with_its_own_grant(torch: bool) -> None:
    if torch:
        pytest.importorskip("torch")

    async def run() -> None:
        access: dict[str, Any] = {"fleet_secret": SECRET, "worker_key": KEY, "torch": torch}
        async with attacked(1, **access) as first, peers_of(first, **access) as second:
            alone = (await second.complete(PROMPT)).tokens
            await second.ask("POST", "/reset_prefix_cache", **bearer(KEY))
            params = await _handed_over(first)
            for _ in range(2):
                assert (await second.complete(PROMPT, kv_transfer_params=params)).tokens == alone
            assert second.counted("kv_fetch_total", "ok") == 1
            assert second.counted("kv_fetch_total", "missing") == 1, "the grant is used up"
            assert second.counted("prompt_tokens_total", "transfer") == len(PROMPT) - 1

    asyncio.run(run())


def test_a_changed_or_foreign_grant_is_refused_at_both_ends() -> None:
    async def run() -> None:
        access: dict[str, Any] = {"fleet_secret": SECRET, "worker_key": KEY}
        foreign: dict[str, Any] = {"fleet_secret": "of another fleet, " * 2, "worker_key": KEY}
        async with (
            attacked(1, **access) as first,
            attacked(3, **foreign) as other,
            peers_of(first, other, **access) as second,
        ):
            params, again = await _handed_over(first), await _handed_over(first)
            version, until, signature = params["coterie_grant"].split(".")
            later = f"{version}.{int(until) + 1000}.{signature}"
            key = params["remote_request_id"]
            wrong: list[dict[str, Any]] = [
                {**params, "coterie_grant": None},
                {**params, "coterie_grant": "x"},
                {**params, "coterie_grant": later},
                {**params, "coterie_grant": f"{version}.{until}.{'0' * 64}"},
                {**params, "coterie_grant": f"{version}.{'9' * 5000}.{signature}"},
                {**params, "coterie_grant": again["coterie_grant"]},
                {**params, "remote_request_id": again["remote_request_id"]},
                await _handed_over(other),
            ]
            alone = (await second.complete(PROMPT)).tokens
            for changed in wrong:
                assert (await second.complete(PROMPT, kv_transfer_params=changed)).tokens == alone
            assert second.counted("kv_fetch_total", "refused") == len(wrong)
            # Of another prompt, and of another tenant: the grant names both.
            assert (await second.complete([9, *PROMPT], kv_transfer_params=params)).status == 200
            assert (await second.complete(PROMPT, kv_transfer_params=params, cache_salt="b")).tokens == alone
            assert second.counted("kv_fetch_total", "refused") == len(wrong) + 2
            # A peer that asks without a grant, or with another's, gets nothing, whatever key it has.
            for grant in ("", "x", later, again["coterie_grant"]):
                asked: dict[str, Any] = {**bearer(KEY), **({"x_coterie_grant": grant} if grant else {})}
                assert (await first.ask("GET", f"/kv/{key}", **asked)).status == 403
            asked = {**bearer(KEY), "x_coterie_grant": params["coterie_grant"]}
            assert (await first.ask("GET", f"/kv/{key}", **asked)).status == 200
            assert (await first.ask("GET", f"/kv/{key}", **asked)).status == 404

    asyncio.run(run())


@pytest.mark.parametrize("torch", ENGINES)
def test_tenants_do_not_share_the_prefix_cache(torch: bool) -> None:
    """With a salt of its own a tenant cannot find out, by the time or the count, what another asked."""

    if torch:
        pytest.importorskip("torch")

    async def cached(worker: Attacked, **more: Any) -> int:
        found: int = (await worker.complete(PROMPT, 1, **more)).json["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    async def run() -> None:
        async with attacked(torch=torch) as worker:
            tokens = (await worker.complete(PROMPT)).tokens
            assert await cached(worker, cache_salt="a") == 0
            assert await cached(worker, cache_salt="b") == 0
            assert [await cached(worker), await cached(worker, cache_salt="a")] == [32, 32]
            assert (await worker.complete(PROMPT, cache_salt="a")).tokens == tokens
            for wrong in ("", 5, ["a"], "x" * 2000, "\ud800"):
                assert (await worker.complete(PROMPT, cache_salt=wrong)).status == 400

    asyncio.run(run())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host": "0.0.0.0"}, "host='0.0.0.0' can be reached from other machines: set COTERIE_FLEET_SECRET"),
        ({"host": "0.0.0.0", "fleet_secret": SECRET}, "COTERIE_WORKER_KEY"),
        ({"host": "10.1.2.3", "worker_key": KEY}, "COTERIE_FLEET_SECRET"),
        ({"host": "worker.example"}, "can be reached from other machines"),
        ({"kv_events": "tcp://*:5601"}, "kv_events='tcp://*:5601' can be read from other machines"),
        ({"expert_events": "tcp://0.0.0.0:5601"}, "tcp://127.0.0.1:"),
        ({"kv_events": "tcp://127.0.0.1:5601", "kv_replay": "tcp://*:5602"}, "kv_replay"),
        ({"kv_replay": "tcp://127.0.0.1:5602"}, "kv_replay needs kv_events"),
        ({"peers": ("10.1.2.3:8100",)}, "COTERIE_FLEET_SECRET"),
        ({"peers": ("nonsense",)}, "peer 'nonsense' must be HOST:PORT"),
        ({"fleet_secret": "short"}, "at least 16"),
    ],
)
def test_a_worker_others_can_reach_does_not_start_without_secrets(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as refused:
        WorkerConfig(tiny_model_path(), **settings)
    assert "\n" not in str(refused.value)
    assert SECRET not in repr(WorkerConfig(tiny_model_path(), fleet_secret=SECRET, worker_key=KEY))
