"""A fleet on this machine: reference workers on coterie-tiny, and the config of a gateway in front of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from coterie.control.switchback import SwitchbackSettings
from coterie.engines.tiny import tiny_model_path
from coterie.engines.worker.embedded import EmbeddedWorker, embedded_fleet
from coterie.errors import ConfigError
from coterie.gateway.config import AdviseSection, ControlSection, GatewayConfig, LimitSettings, Role, WorkerEntry
from coterie.gateway.fleet.keeper import FleetKeeper
from coterie.gateway.fleet.spec import RouterSpec
from coterie.net.access import FleetAccess
from coterie.net.processes import temporary_folder

OURS = "latency_aware"
DECODERS = 3
PLACES = 16
ADVISED = ControlSection(score="experts", advise=AdviseSection(ranks=4))
"""Control loop of an embedded fleet. Fits are compared by distinct experts, as coterie-tiny's decode times are near
zero. Placement advice is for a group of four ranks."""


NO_TURNS = SwitchbackSettings(enabled=False)


class EmbeddedFleet(NamedTuple):
    """Running workers: the first one prefills, the others decode."""

    workers: list[EmbeddedWorker]
    folder: Path
    """Folder of the workers' logs."""

    @property
    def access(self) -> FleetAccess:
        return self.workers[0].access

    def config(
        self,
        listen: str = "127.0.0.1:0",
        prefill: RouterSpec = RouterSpec("joint"),  # noqa: B008 (frozen)
        decode: RouterSpec | None = None,
        limits: LimitSettings = LimitSettings(),  # noqa: B008 (frozen)
        control: ControlSection = ADVISED,
        switchback: SwitchbackSettings = NO_TURNS,
    ) -> GatewayConfig:
        """Return the config of a gateway in front of these workers."""
        entries = [
            WorkerEntry(
                id=f"{worker.role}-{number - (worker.role == 'decode')}",
                url=worker.url,
                role=worker.role,
                places=PLACES,
                kv_events=worker.kv_events,
                kv_replay=worker.kv_replay,
                expert_events=worker.expert_events,
                secure_events=True,
            )
            for number, worker in enumerate(self.workers)
        ]
        return GatewayConfig(
            workers=entries,
            listen=listen,
            handshake="vllm",
            prefill=prefill,
            decode=decode_router(None) if decode is None else decode,
            tokenizer=str(tiny_model_path()),
            limits=limits,
            control=control,
            switchback=switchback,
        )


def tiny_fit_path() -> Path:
    """Return the path of a router fit for coterie-tiny.

    The file is not in the model's folder: vLLM would load every safetensors file there as weights.
    """
    return tiny_model_path().with_name("coterie-tiny-router.safetensors")


def decode_router(name: str | None) -> RouterSpec:
    """Return the spec of a router for the decode workers, by its name, with the fit that ships with the model."""
    spec = RouterSpec(OURS if name is None else name, fit=str(tiny_fit_path()))
    FleetKeeper(spec)  # raises ConfigError if the router needs anything else
    return spec


@contextlib.contextmanager
def run_embedded(decoders: int = DECODERS) -> Iterator[EmbeddedFleet]:
    """Run one prefill and `decoders` decode workers, each a process; they are killed when the block ends."""
    with temporary_folder() as folder, contextlib.ExitStack() as stack:
        roles: list[Role] = ["prefill"]
        roles += ["decode"] * decoders
        workers = embedded_fleet(roles, folder)
        for worker in workers:
            stack.callback(_end, worker)
            worker.process.launch()
        for worker in workers:
            worker.process.wait_ready()
        yield EmbeddedFleet(workers, folder)


def _end(worker: EmbeddedWorker) -> None:
    with contextlib.suppress(ConfigError):  # the worker may not have been started
        worker.process.kill()
