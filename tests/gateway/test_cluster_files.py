"""What a cluster runs: the example's config is one the gateway takes, and its alerts look at metrics that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from coterie.gateway.access import SINGLE
from coterie.gateway.config import GatewayConfig
from coterie.gateway.gateway import HEALTH
from coterie.gateway.watching.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "examples" / "kubernetes" / "gateway.yaml"
RULES = ROOT / "examples" / "prometheus" / "coterie.rules.yaml"


PAGE = ROOT / "docs" / "gateway" / "watching.md"
PROMTOOL = shutil.which("promtool")


def _of(kind: str, name: str = "coterie") -> dict[str, Any]:
    items = yaml.safe_load_all(MANIFEST.read_text())
    return next(item for item in items if (item["kind"], item["metadata"]["name"]) == (kind, name))


def _scrape_configs() -> dict[str, dict[str, Any]]:
    """The jobs of the page and of the manifest."""
    (block,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", PAGE.read_text(), re.S)
    return {
        "page": yaml.safe_load(block),
        "manifest": yaml.safe_load(_of("ConfigMap", "coterie-scrape")["data"]["coterie.yaml"]),
    }


@pytest.mark.parametrize("where", ["page", "manifest"])
def test_prometheus_is_told_to_show_its_key(where: str, tmp_path: Path) -> None:
    config = _scrape_configs()[where]
    (job,) = config["scrape_configs"]
    assert Path(job["authorization"]["credentials_file"]).is_absolute()
    assert "metrics" in SINGLE
    assert "--only metrics" in (PAGE if where == "page" else MANIFEST).read_text()
    if where == "manifest":
        pods = _of("StatefulSet")["spec"]["template"]
        (name, value), *_ = pods["metadata"]["labels"].items()
        (found_by,) = job.pop("kubernetes_sd_configs")  # which Debian's promtool is built without
        assert found_by["selectors"] == [{"role": "pod", "label": f"{name}={value}"}]
        assert pods["spec"]["containers"][0]["ports"][0]["name"] == job["relabel_configs"][0]["regex"]
        assert "annotations" not in pods["metadata"], "a scrape without the key would be refused"
    if PROMTOOL is not None:
        path = tmp_path / "prometheus.yaml"
        path.write_text(yaml.safe_dump(config))
        ran = subprocess.run([PROMTOOL, "check", "config", "--syntax-only", path], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr


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


def test_a_pod_leaves_its_service_before_it_drains() -> None:
    spec = _of("StatefulSet")["spec"]["template"]["spec"]
    config = msgspec.convert(yaml.safe_load(_of("ConfigMap")["data"]["gateway.yaml"]), GatewayConfig)
    container = spec["containers"][0]
    assert {container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe")} == HEALTH
    slept_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert slept_s >= container["readinessProbe"]["periodSeconds"]
    assert spec["terminationGracePeriodSeconds"] > slept_s + config.drain_s


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
