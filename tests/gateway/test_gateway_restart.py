"""What was set at run time survives a restart; a state that cannot be used is set aside and told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from canned_workers import Canned, canned_workers
from coterie.errors import ConfigError
from coterie.gateway.config import GatewayConfig, WorkerEntry
from coterie.gateway.fleet.spec import RouterSpec
from coterie.gateway.saved import SavedState, load_state, lock_state
from coterie.gateway.serve import RunningGateway
from gateway_runs import Run, config_of, gateway, run


def entry(worker: Canned, **more: Any) -> dict[str, Any]:
    return {"id": worker.name, "url": worker.url, **more}


async def ask(found: Run, method: str, path: str, body: Any = None) -> None:
    got = await found.client.ask(method, path, body)
    assert got.status == 200, got.body


def ids(found: Run) -> set[str]:
    return {one.id for one in found.running.parts.entries()}


def test_workers_and_routers_come_back(tmp_path: Path) -> None:
    async def test() -> None:
        state = str(tmp_path / "state.json")
        async with canned_workers("a", "b", "c") as (a, b, c):
            config = config_of([a, b], state=state)
            async with gateway(config) as found:
                assert not Path(state).exists(), "nothing was set yet"
                await ask(found, "POST", "/workers", entry(c, places=3, kv_events="tcp://127.0.0.1:1"))
                await ask(found, "DELETE", "/workers/b")
                await ask(found, "PUT", "/routers/decode", {"router": "round_robin"})
            async with gateway(config) as found:
                assert ids(found) == {"a", "c"}
                assert (
                    found.running.parts.pools["decode"].members["c"].entry.places,
                    found.running.parts.pools["decode"].members["c"].entry.kv_events,
                ) == (3, "tcp://127.0.0.1:1")
                assert found.running.parts.pools["decode"].spec.router == "round_robin"
                assert (await found.client.complete()).status == 200
                await ask(found, "POST", "/workers", entry(b))
                await ask(found, "POST", "/workers", entry(a, places=2))
            async with gateway(config_of([b], state=state)) as found:  # the file lists less now
                assert ids(found) == {"a", "b", "c"}
                assert found.running.parts.pools["decode"].members["a"].entry.places == 2
                await ask(found, "DELETE", "/workers/c")
                await ask(found, "DELETE", "/workers/a")
            async with gateway(config_of([b], state=state)) as found:
                assert ids(found) == {"b"}
            async with gateway(config_of([a, b])) as found:  # without a state file the config is all there is
                assert ids(found) == {"a", "b"}

    run(test)


def test_a_reload_applies_what_changed_in_the_file(tmp_path: Path) -> None:
    """The file's changes are newer than those made before at run time; what it leaves alone stays as it was set."""

    async def test() -> None:
        state, path = tmp_path / "state.json", tmp_path / "fleet.yaml"
        async with canned_workers("a", "b", "c") as (a, b, c):
            config = config_of([a, b], state=str(state))
            async with gateway(config, path) as found:
                await ask(found, "POST", "/workers", entry(c))
                await ask(found, "POST", "/workers", entry(a, places=2))
                await ask(found, "DELETE", "/workers/b")
                await ask(found, "PUT", "/routers/decode", {"router": "round_robin"})
                path.write_bytes(msgspec.yaml.encode(msgspec.structs.replace(config, drain_s=2.0)))
                await ask(found, "POST", "/reload")
                assert ids(found) == {"a", "c"}
                assert found.running.parts.pools["decode"].spec.router == "round_robin"
                changed = [WorkerEntry(id="a", url=a.url, places=5), WorkerEntry(id="b", url=b.url, places=6)]
                new = msgspec.structs.replace(config, workers=changed, decode=RouterSpec("power_of_two"))
                path.write_bytes(msgspec.yaml.encode(new))
                await ask(found, "POST", "/reload")
                assert {one.id: one.places for one in found.running.parts.entries()} == {"a": 5, "b": 6, "c": 16}
                assert found.running.parts.pools["decode"].spec.router == "power_of_two"
            assert load_state(state).state == SavedState([WorkerEntry(id="c", url=c.url)])

    run(test)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b'{"format":"coterie-gateway-state","version":9}',
        b'{"format":"coterie-gateway-state","version":1,"workers":[{"id":"p","url":"http://x","role":"prefill"}]}',
        b'{"format":"coterie-gateway-state","version":1,"routers":{"decode":{"router":"unheard_of"}}}',
        b'{"format":"coterie-gateway-state","version":1,"routers":{"decode":{"router":"latency_aware","fit":"/x"}}}',
    ],
)
def test_a_state_that_cannot_be_used_is_set_aside(text: bytes, tmp_path: Path) -> None:
    async def test() -> None:
        state = tmp_path / "state.json"
        state.write_bytes(text)
        async with canned_workers("a", "b") as (a, b):
            async with gateway(config_of([a], state=str(state))) as found:
                assert ids(found) == {"a"}
                assert (await found.client.complete()).status == 200
                assert (tmp_path / "state.json.damaged-1").read_bytes() == text
                await ask(found, "POST", "/workers", entry(b))
                said = [line for line in found.logged().splitlines() if '"warning"' in line]
                warnings = [one for one in said if "tokenizer" not in one]
                assert len(warnings) == 1
                assert "damaged-1" in warnings[0]
            async with gateway(config_of([a], state=str(state))) as found:
                assert ids(found) == {"a", "b"}

    run(test)


def test_a_state_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    async def test() -> None:
        config: GatewayConfig
        async with canned_workers("a", "b") as (a, b):
            folder = tmp_path / "state"
            folder.mkdir()
            config = config_of([a], state=str(folder / "state.json"))
            async with gateway(config) as found:
                shutil.rmtree(folder)
                got = await found.client.ask("POST", "/workers", entry(b))
                assert (got.status, got.json["error"]["code"]) == (500, "not_saved")
                assert ids(found) == {"a", "b"}, "it is in effect, and the answer says for how long"

    run(test)


def test_two_gateways_never_share_a_state(tmp_path: Path) -> None:
    """A worker that one of them had acknowledged was gone after a restart."""

    async def test() -> None:
        state, other_name = tmp_path / "state.json", tmp_path / "link.json"
        other_name.symlink_to(state)
        async with canned_workers("a", "b") as (a, b):
            async with gateway(config_of([a], state=str(state))) as found:
                await ask(found, "POST", "/workers", entry(b))
                for name in (state, other_name):
                    with pytest.raises(ConfigError, match=rf"{name}.*{os.getpid()}"):
                        RunningGateway(config_of([a], state=str(name)))
                (tmp_path / "absent").symlink_to(tmp_path / "no" / "folder")
                with pytest.raises(ConfigError, match="absent"):
                    RunningGateway(config_of([a], state=str(tmp_path / "absent")))
            async with gateway(config_of([a], state=str(state))) as found:
                assert ids(found) == {"a", "b"}
        with pytest.raises(ConfigError, match="no router"):  # one that cannot start lets go of the file
            RunningGateway(config_of([a], state=str(state), decode=RouterSpec("no router")))
        os.close(lock_state(state))

    run(test)


def test_the_state_of_a_gateway_that_was_killed_can_be_used(tmp_path: Path) -> None:
    program = "import sys; from coterie.gateway.saved import lock_state; lock_state(sys.argv[1]); print(); input()"
    command = [sys.executable, "-c", program, str(tmp_path / "state.json")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(ConfigError, match=str(holder.pid)):
            lock_state(tmp_path / "state.json")
        holder.kill()
    os.close(lock_state(tmp_path / "state.json"))
