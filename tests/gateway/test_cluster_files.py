"""What a cluster runs: the example's config is one the gateway takes, and its alerts look at metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import yaml

from coterie.gateway.config import GatewayConfig
from coterie.gateway.watching.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "examples" / "kubernetes" / "gateway.yaml"
RULES = ROOT / "examples" / "prometheus" / "coterie.rules.yaml"


def _of(kind: str) -> dict[str, Any]:
    return next(item for item in yaml.safe_load_all(MANIFEST.read_text()) if item["kind"] == kind)


def test_the_manifest_serves_what_the_gateway_takes() -> None:
    config = msgspec.convert(yaml.safe_load(_of("ConfigMap")["data"]["gateway.yaml"]), GatewayConfig)
    pods = _of("StatefulSet")
    container = pods["spec"]["template"]["spec"]["containers"][0]
    assert config.listen.endswith(f":{container['ports'][0]['containerPort']}")
    names = {
        f"http://{pods['metadata']['name']}-{n}.{pods['spec']['serviceName']}" for n in range(pods["spec"]["replicas"])
    }
    assert {url.rpartition(":")[0] for url in config.peers.urls} == names
    mounted = [Path(mount["mountPath"]) for mount in container["volumeMounts"]]
    for path in (config.keys, config.state, config.decode.fit):
        assert Path(path or "/").parent in mounted


def test_the_image_runs_as_the_user_and_on_the_port_of_the_manifest() -> None:
    image = (ROOT / "Dockerfile").read_text()
    spec = _of("StatefulSet")["spec"]["template"]["spec"]
    assert f"USER {spec['securityContext']['runAsUser']}\n" in image
    assert f"EXPOSE {spec['containers'][0]['ports'][0]['containerPort']} " in image


def test_alerts_are_of_metrics_that_the_gateway_has() -> None:
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    known = {line.split()[2] for line in Metrics().render().decode().splitlines() if line.startswith("# TYPE")}
    for rule in rules:
        asked = set(re.findall(r"coterie_\w+", rule["expr"]))
        assert asked
        assert asked <= known, rule["alert"]
        assert set(rule["annotations"]) == {"summary", "next"}
