"""Start the decode component: ``python -m coterie.stacks.dynamo --config router.yaml``.

The environment is Dynamo's own: ``DYN_DISCOVERY_BACKEND``, ``DYN_REQUEST_PLANE``, ``DYN_EVENT_PLANE``, and
``DYN_SYSTEM_PORT`` for metrics.
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from coterie.errors import CoterieError, UnavailableError, check
from coterie.gateway.config import GatewayConfig, read_config

TESTED = "1.6.1"
"""Version of ai-dynamo-runtime that the tests run with."""


def check_installed() -> None:
    """Raise UnavailableError if Dynamo is missing; warn of a version that was not tested."""
    try:
        installed = version("ai-dynamo-runtime")
    except PackageNotFoundError:
        raise UnavailableError(f"Dynamo {TESTED} is needed: pip install 'coterie[dynamo]'") from None
    if installed != TESTED:
        warnings.warn(f"ai-dynamo-runtime {installed} was not tested with Coterie; {TESTED} was", stacklevel=2)


def read_settings(path: Path | None) -> GatewayConfig:
    """Read the router's settings from a gateway's config: `decode`, and `predictor`."""
    config = GatewayConfig() if path is None else read_config(path)
    check(not config.workers, f"{path}: leave `workers` out: Dynamo lists them")
    return config


def check_endpoints(decoders: str, endpoint: str) -> None:
    """Raise ConfigError for names that Dynamo cannot use, or in one namespace, where the frontend sees both."""
    for option, name in (("--decoders", decoders), ("--endpoint", endpoint)):
        check(name.count(".") == 2 and all(name.split(".")), f"{option}={name} must be NAMESPACE.COMPONENT.ENDPOINT")
    namespace = decoders.partition(".")[0]
    check(
        namespace != endpoint.partition(".")[0],
        f"--decoders and --endpoint must have two namespaces, not {namespace!r}: the frontend watches the second",
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m coterie.stacks.dynamo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, help="YAML file with `decode`, and `predictor`, as for coterie serve")
    parser.add_argument("--decoders", default="decoders.backend.generate", help="endpoint of the decode workers")
    parser.add_argument("--endpoint", default="coterie.backend.generate", help="endpoint of this component")
    parser.add_argument("--model-path", help="folder or name of the model; default: that of the decode workers")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        check_endpoints(given.decoders, given.endpoint)
        config = read_settings(given.config)
        check_installed()
        import uvloop  # comes with Dynamo, whose own components use it

        from coterie.stacks.dynamo.component import Settings, serve_component

        planes = {
            "discovery": os.environ.get("DYN_DISCOVERY_BACKEND", "etcd"),
            "request": os.environ.get("DYN_REQUEST_PLANE", "tcp"),
        }
        uvloop.run(serve_component(Settings(given.decoders, given.endpoint, given.model_path), config, planes))
    except CoterieError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
