"""Workers found among the pods of a Kubernetes namespace: those that an InferencePool selects.

Pods are listed again and again rather than watched: one small request every few seconds, and nothing to miss. A pod
joins when it has an address, and leaves when it is gone or ends; whether it gets requests is for health checks to say.
Who may create pods chooses their names: a pod never replaces a worker that the config or an administrator has named.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from urllib.parse import quote

import msgspec

from coterie.errors import ConfigError, CoterieError, check
from coterie.gateway.config import PodSection, WorkerEntry
from coterie.gateway.parts import GatewayParts
from coterie.net.access import Address
from coterie.net.http1.upstream import Upstream

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder with the token and the namespace of a pod's service account."""
LIST_BYTES = 64 << 20
"""Most bytes of a list of pods, about 10 KiB each."""


class _Meta(msgspec.Struct, rename="camel"):
    name: str
    labels: dict[str, str] = {}
    deletion_timestamp: str | None = None


class _Status(msgspec.Struct, rename="camel"):
    phase: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")


class _Pod(msgspec.Struct):
    metadata: _Meta
    status: _Status


class _Pods(msgspec.Struct):
    items: list[_Pod]


class PodWatch:
    """Keeps a gateway's workers those of the pods."""

    def __init__(self, section: PodSection, account: Path = ACCOUNT) -> None:
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        check(section.api or host, "pods: api is needed outside of a cluster, such as http://127.0.0.1:8001")
        self.section, self.account = section, account
        self.upstream = Upstream(section.api or f"https://{Address(host, int(port))}")
        self._problem = ""

    async def run(self, parts: GatewayParts) -> None:
        """Follow the pods until cancelled; a failure is logged once and leaves the workers as they are."""
        while True:
            problem = ""
            try:
                await self.look(parts)
            except (CoterieError, OSError, ValueError, RecursionError) as error:
                problem = f"pods: {error}"
            if problem not in ("", self._problem):
                parts.log.warning(problem)
            self._problem = problem
            await asyncio.sleep(self.section.every_s)

    async def look(self, parts: GatewayParts) -> None:
        """List the pods once; add and remove workers. Raises ConfigError, after all others, if a pod cannot join."""
        namespace = self.section.namespace or (self.account / "namespace").read_text().strip()
        token = self.account / "token"
        headers = [(b"authorization", b"Bearer " + token.read_bytes().strip())] if token.exists() else []
        target = f"/api/v1/namespaces/{quote(namespace, '')}/pods?labelSelector={quote(self.section.selector)}"
        answer = await self.upstream.send("GET", target, headers)
        data = await answer.read(LIST_BYTES)
        check(answer.status == 200, f"HTTP {answer.status} for {target}")
        entries = [self._entry(pod) for pod in msgspec.json.decode(data, type=_Pods).items if _runs(pod)]
        named = {worker.id for worker in (*parts.config.workers, *parts.changes.workers)}
        present, before = {entry.id for entry in parts.entries()}, parts.pods.keys()
        parts.pods = {entry.id: entry for entry in entries if entry.id not in named}
        for id in before & present - parts.pods.keys() - named:
            parts.remove_worker(id)
        refused: ConfigError | None = None
        for entry in entries:
            try:
                check(entry.id not in named, f"pod {entry.id!r} cannot join: a worker that is no pod has this id")
                parts.add_worker(entry)
            except ConfigError as error:
                refused = error
        if refused is not None:
            raise refused

    def _entry(self, pod: _Pod) -> WorkerEntry:
        section, host = self.section, pod.status.pod_ip
        role = pod.metadata.labels.get(section.role_label, "both")
        return WorkerEntry(
            id=pod.metadata.name,
            url=f"http://{Address(host, section.port)}",
            role="prefill" if role == "prefill" else "decode" if role == "decode" else "both",
            places=section.places,
            kv_events=None if section.kv_events_port is None else f"tcp://{Address(host, section.kv_events_port)}",
        )


def _runs(pod: _Pod) -> bool:
    return bool(pod.status.pod_ip) and pod.status.phase == "Running" and pod.metadata.deletion_timestamp is None
