"""The picker's manifest: against the published schemas, and against what the picker itself takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from coterie.gateway.config import parse_config

MANIFEST = Path(__file__).resolve().parents[3] / "examples" / "kubernetes" / "picker.yaml"
KUBERNETES = "1.34"
ITEMS: list[dict[str, Any]] = list(yaml.safe_load_all(MANIFEST.read_text()))

pytestmark = pytest.mark.scale


def item(kind: str) -> dict[str, Any]:
    (one,) = (one for one in ITEMS if one["kind"] == kind)
    return one


def strict(schema: Any) -> Any:
    """The schema, with no properties but those it names."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    more = {"additionalProperties": False} if "properties" in schema else {}
    return {key: strict(value) for key, value in schema.items()} | more


def test_the_pool_is_one_that_the_extension_takes() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = strict(yaml.safe_load((Path(__file__).parent / "inference_pool.yaml").read_text()))
    del schema["properties"]["metadata"]
    pool = {key: value for key, value in item("InferencePool").items() if key != "metadata"}
    jsonschema.validate(pool, schema)
    wrongs: list[dict[str, Any]] = [{"targetPorts": [{"number": 0}]}, {"selector": {}}, {"selektor": {}}]
    for wrong in wrongs:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**pool, "spec": {**pool["spec"], **wrong}}, schema)


def test_the_rest_is_what_kubernetes_takes() -> None:
    kubernetes = pytest.importorskip("kubernetes_validate")
    core = [one for one in ITEMS if not one["apiVersion"].startswith(("gateway.", "inference."))]
    assert {one["kind"] for one in core} >= {"Deployment", "NetworkPolicy", "Role", "RoleBinding", "Service"}
    for one in core:
        kubernetes.validate(one, KUBERNETES, strict=True)
        with pytest.raises(kubernetes.ValidationError):
            kubernetes.validate({**one, "metdata": {}}, KUBERNETES, strict=True)


def test_what_the_manifest_names_is_there() -> None:
    pool, service, deployment = item("InferencePool"), item("Service"), item("Deployment")
    config = parse_config(item("ConfigMap")["data"]["picker.yaml"], Path("picker.yaml"))
    assert config.picker is not None
    assert config.pods is not None
    assert dict([config.pods.selector.split("=")]) == pool["spec"]["selector"]["matchLabels"]
    assert [{"number": config.pods.port}] == pool["spec"]["targetPorts"]
    reference = pool["spec"]["endpointPickerRef"]
    assert reference["name"] == service["metadata"]["name"]
    port = int(config.picker.listen.rpartition(":")[2])
    assert reference["port"]["number"] == service["spec"]["ports"][0]["port"] == port
    template = deployment["spec"]["template"]
    assert template["metadata"]["labels"] == service["spec"]["selector"]
    (container,) = template["spec"]["containers"]
    for probe, named in (("livenessProbe", "liveness"), ("readinessProbe", "readiness")):
        assert container[probe]["grpc"] == {"port": port, "service": named}
    assert item("RoleBinding")["subjects"][0]["name"] == template["spec"]["serviceAccountName"]
    assert item("HTTPRoute")["spec"]["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"]
