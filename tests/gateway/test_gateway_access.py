"""Who may ask a gateway what: keys, administrators, rates, and programs of this machine where there are no keys."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from canned_workers import Canned, canned_workers
from coterie.errors import ConfigError
from coterie.gateway.access import new_key
from coterie.gateway.config import GatewayConfig, PeerSettings, PickerSection
from coterie.gateway.serve import RunningGateway, check_config
from coterie.net.http1.messages import HttpRequest
from coterie.net.http1.responder import Responder
from gateway_runs import Run, config_of, gateway, idle, run, write_keys
from http1_peers import Raw, until

ADMIN_PATHS = ("/metrics", "/decisions", "/workers", "/routers", "/switchback")
BODY = {"model": "canned", "prompt": "Hello"}


class Locked(NamedTuple):
    """A gateway with keys."""

    run: Run
    worker: Canned
    keys: dict[str, str]
    path: Path


@contextlib.asynccontextmanager
async def locked(folder: Path, rate: float | None = None) -> AsyncIterator[Locked]:
    path = folder / "keys.yaml"
    keys = write_keys(path, "team", "others", "admin", rate=rate)
    async with canned_workers("a") as (worker,), gateway(config_of([worker], keys=str(path))) as found:
        yield Locked(found, worker, keys, path)


def test_only_known_keys_are_served(tmp_path: Path) -> None:
    async def test() -> None:
        async with locked(tmp_path) as found:
            ask, keys = found.run.client.ask, found.keys
            stored = hashlib.sha256(keys["team"].encode()).hexdigest()
            wrong = [None, "", "x", keys["team"][:-1], keys["team"] + "x", stored, keys["team"] * 20]
            for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/nowhere", "/workers"):
                for key in wrong:
                    got = await ask("POST", path, BODY, key=key)
                    assert got.status == 401, (path, key)
                    assert got.headers[b"www-authenticate"] == b"Bearer"
                    assert got.json["error"]["type"] == "authentication_error"
            basic = [(b"authorization", b"Basic " + keys["team"].encode())]
            assert (await ask("POST", "/v1/completions", BODY, basic)).status == 401
            assert not found.worker.completions
            assert (await ask("GET", "/health")).status == 200, "a load balancer has no key"
            assert (await ask("POST", "/v1/completions", BODY, key=keys["team"])).status == 200
            asked = found.worker.completions[0]
            assert b"authorization" not in asked.headers, "no worker sees a caller's key"
            assert keys["team"].encode() not in asked.raw
            rejected = found.run.metrics['coterie_gateway_rejected_total{reason="key"}']
            assert rejected == 5 * len(wrong) + 1
            idle(found.run)

    run(test)


def test_administrators_have_keys_of_their_own(tmp_path: Path) -> None:
    async def test() -> None:
        async with locked(tmp_path) as found:
            ask, keys = found.run.client.ask, found.keys
            for path in (*ADMIN_PATHS, "/reload", "/workers/a", "/nowhere", "/v1/../workers", "//workers"):
                got = await ask("GET", path, key=keys["team"])
                assert got.status == (404 if path.startswith("/v1/") else 403), path
            for method, path in (("DELETE", "/workers/a"), ("POST", "/reload"), ("PUT", "/routers/decode")):
                assert (await ask(method, path, key=keys["team"])).status == 403
            assert found.run.running.parts.pools["decode"].members["a"].entry.url == found.worker.url
            for path in ADMIN_PATHS:
                assert (await ask("GET", path, key=keys["admin"])).status == 200
            origin = [(b"origin", b"https://console.example")]
            assert (await ask("GET", "/workers", headers=origin, key=keys["admin"])).status == 200

    run(test)


def test_a_key_for_metrics_opens_nothing_else(tmp_path: Path) -> None:
    """What it opens is Prometheus' text format, read by Prometheus' own parser."""

    async def test() -> None:
        path = tmp_path / "keys.yaml"
        keys = write_keys(path, "admin")
        one = {only: new_key(f"for {only}", only=only) for only in ("metrics", "peers")}
        with path.open("a") as stream:
            stream.write("".join(made.entry.as_yaml() for made in one.values()))
        async with canned_workers("a") as (worker,), gateway(config_of([worker], keys=str(path))) as found:
            ask = found.client.ask
            assert (await ask("GET", "/metrics", key=keys["admin"])).status == 200
            assert (await ask("GET", "/metrics")).status == 401
            got = await ask("GET", "/metrics", key=one["metrics"].key)
            assert got.headers[b"content-type"].startswith(b"text/plain; version=0.0.4")
            families = {family.name for family in text_string_to_metric_families(got.body.decode())}
            assert "coterie_gateway_requests" in families
            assert (await ask("GET", "/peers", key=one["peers"].key)).status == 200
            for only, made in one.items():
                other = "/peers" if only == "metrics" else "/metrics"
                for method, target in (
                    *(("GET", target) for target in (other, "/v1/models", "/workers", "/live", f"/{only}/a")),
                    *(("POST", target) for target in ("/v1/completions", "/workers", "/reload")),
                    ("DELETE", "/workers/a"),
                ):
                    got = await ask(method, target, BODY if method == "POST" else None, key=made.key)
                    assert (got.status, f"opens /{only} alone" in got.json["error"]["message"]) == (403, True), target
                assert (await ask("POST", f"/{only}", {}, key=made.key)).status in (405, 413)
            assert not worker.completions
            idle(found)

    run(test)


def test_peers_are_sent_no_key_that_opens_more_than_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.yaml"
    keys = write_keys(path, "admin", "team")
    made = new_key("gateways", only="peers")
    with path.open("a") as stream:
        stream.write(made.entry.as_yaml())

    def config(*urls: str) -> GatewayConfig:
        return config_of([], keys=str(path), peers=PeerSettings(urls=list(urls), every_s=0.005))

    for name in ("admin", "team"):
        monkeypatch.setenv("COTERIE_PEER_KEY", keys[name])
        with pytest.raises(ConfigError, match=f"COTERIE_PEER_KEY holds the key of '{name}', which opens more"):
            check_config(config("http://127.0.0.1:1"))
    monkeypatch.setenv("COTERIE_PEER_KEY", made.key)
    monkeypatch.setenv("COTERIE_ADMIN_KEY", keys["admin"])
    shown: list[bytes | None] = []

    async def act(_: Canned, request: HttpRequest, responder: Responder) -> None:
        shown.append(request.header(b"authorization"))
        responder.send(500)

    async def test() -> None:
        async with (
            canned_workers("spy", spy=act) as (spy,),
            gateway(config()) as first,
            gateway(config(first.running.url, spy.url)) as second,
        ):
            await until(lambda: second.running.parts.peers.peers[0].present and shown)

    run(test)
    assert set(shown) == {b"Bearer " + made.key.encode()}, "never the administrator's"


def test_rates_are_per_key(tmp_path: Path) -> None:
    async def test() -> None:
        async with locked(tmp_path, rate=1e-3) as found:
            ask, keys = found.run.client.ask, found.keys
            assert (await ask("POST", "/v1/completions", BODY, key=keys["team"])).status == 200
            got = await ask("POST", "/v1/completions", BODY, key=keys["team"])
            assert (got.status, got.json["error"]["code"]) == (429, "rate_limit_exceeded")
            assert 900 < int(got.headers[b"retry-after"]) <= 1001
            assert (await ask("POST", "/v1/completions", BODY, key=keys["others"])).status == 200
            assert (await ask("GET", "/metrics", key=keys["admin"])).status == 200, "not counted"
            assert (await ask("GET", "/metrics", key=keys["admin"])).status == 200
            assert found.run.metrics['coterie_gateway_rejected_total{reason="rate"}'] == 1
            assert len(found.worker.completions) == 2
            idle(found.run)

    run(test)


def test_callers_share_no_cached_prefix(tmp_path: Path) -> None:
    """The salt is the caller's own, is not guessed from what is public, and is the same after a restart."""

    async def salts(config: GatewayConfig, worker: Canned, keys: dict[str, str]) -> list[str]:
        worker.asked.clear()
        async with gateway(config) as found:
            for name in ("team", "others", "team"):
                await found.client.ask("POST", "/v1/completions", BODY, key=keys[name])
            await found.client.ask("POST", "/v1/completions", {**BODY, "cache_salt": "own"}, key=keys["team"])
        return [one.body["cache_salt"] for one in worker.completions]

    async def test() -> None:
        path = tmp_path / "keys.yaml"
        keys = write_keys(path, "team", "others")
        async with canned_workers("a") as (worker,):
            config = config_of([worker], keys=str(path))
            team, others, again, own = await salts(config, worker, keys)
            assert team == again != others
            assert own == f"{team}/own", "a caller may divide its own cache, and reach no other's"
            assert len(team) == len(others) == 32
            assert "team" not in team
            assert await salts(config, worker, keys) == [team, others, again, own]
            apart = config_of([worker], keys=str(path), separate_caches=False)
            worker.asked.clear()
            async with gateway(apart) as found:
                await found.client.ask("POST", "/v1/completions", BODY, key=keys["team"])
            assert "cache_salt" not in worker.completions[0].body

    run(test)


def test_a_key_that_is_replaced_takes_its_cache_along(tmp_path: Path) -> None:
    async def test() -> None:
        keys_file, path = tmp_path / "keys.yaml", tmp_path / "fleet.yaml"
        old = write_keys(keys_file, "team")["team"]
        async with canned_workers("a") as (worker,):
            config = config_of([worker], keys=str(keys_file))
            path.write_bytes(msgspec.yaml.encode(config))
            async with gateway(config, path) as found:
                await found.client.ask("POST", "/v1/completions", BODY, key=old)
                new = write_keys(keys_file, "team")["team"]
                await found.running.reload()
                assert (await found.client.ask("POST", "/v1/completions", BODY, key=old)).status == 401
                assert (await found.client.ask("POST", "/v1/completions", BODY, key=new)).status == 200
        first, second = (one.body["cache_salt"] for one in worker.completions)
        assert first != second, "who gets a name later must not read what the one before it sent"

    run(test)


HERE = [b"127.0.0.1", b"127.0.0.1:8000", b"127.9.9.9", b"localhost:1", b"LOCALHOST", b"[::1]", b"[::1]:8000"]
ELSEWHERE = [
    b"",
    b"::1",
    b"evil.example",
    b"127.0.0.1.evil.example",
    b"localhost.evil.example:80",
    b"evil.example:127.0.0.1",
    b"127.0.0.1:80@evil.example",
    b"evil@127.0.0.1",
    b"127.0.0.1:x",
    b"127.0.0.1,evil.example",
    b"[::1",
    b"[[::1]]",
    b"0.0.0.0",
    b"2130706433",
    b"\xff",
]


def test_without_keys_only_requests_for_this_machine() -> None:
    async def test() -> None:
        async with gateway(config_of([])) as found:
            for host in (*HERE, *ELSEWHERE):
                for path, served in ((b"/routers", b"200"), (b"/v1/nowhere", b"404")):
                    raw = await Raw.open(found.port)
                    raw.send(b"GET %b HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n" % (path, host))
                    line = (await raw.rest()).partition(b"\r\n")[0]
                    assert line.split()[1] == (served if host in HERE else b"403"), (host, path)

    run(test)


def test_without_keys_no_page_of_a_browser_gets_in() -> None:
    async def test() -> None:
        async with canned_workers("a") as (worker,), gateway(config_of([worker])) as found:
            ask, origin = found.client.ask, [(b"origin", b"https://evil.example")]
            for method, path in (
                ("GET", "/workers"),
                ("POST", "/workers"),
                ("DELETE", "/workers/a"),
                ("POST", "/reload"),
            ):
                assert (await ask(method, path, headers=origin)).status == 403, path
            entry = msgspec.json.encode({"id": "b", "url": "http://evil.example"})
            for kind in (b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data", b""):
                got = await found.client.upstream.send("POST", "/workers", [(b"content-type", kind)], entry)
                assert got.status == 415, "what a form can send is refused"
                got.close()
            assert [one.id for one in found.running.parts.entries()] == ["a"]

    run(test)


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "10.0.0.1:80", "[::]:0", "example.com:80", "192.168.0.1:0"])
def test_others_are_not_served_without_keys(listen: str, tmp_path: Path) -> None:
    config = GatewayConfig(listen=listen)
    with pytest.raises(ConfigError, match="--new-key"):
        check_config(config)

    async def test() -> None:
        with pytest.raises(ConfigError, match="--new-key"):
            RunningGateway(config)

    run(test)
    path = tmp_path / "keys.yaml"
    write_keys(path, "team")
    check_config(GatewayConfig(listen=listen, keys=str(path)))


def test_a_pickers_certificate_that_cannot_be_read_is_named_before_the_start(tmp_path: Path) -> None:
    wrong = tmp_path / "cert.pem"
    for text in (None, "no certificate"):
        if text is not None:
            wrong.write_text(text)
        picker = PickerSection(certificate=str(wrong), key=str(wrong))
        with pytest.raises(ConfigError, match="PEM files"):
            check_config(GatewayConfig(picker=picker))
