"""vLLM's entry point (``vllm.general_plugins``): registers CoterieConnector in every process.

Nothing else happens unless ``--kv-transfer-config`` names the connector or the environment sets the EPLB policy. An
untested version of vLLM gets a connector of the same name that does nothing, and keeps its own policy: the engine runs
as if the plugin were absent, and the log says so.

Imports as little as possible: vLLM's CPU workers inspect every loaded module at start and fail on llvmlite's.
"""

from __future__ import annotations

import logging
import os

from coterie.engines.vllm import EPLB_VARIABLE

KNOWN_VERSIONS = ("0.32",)
"""Minor versions of vLLM that this plugin was tested with."""

NAME = "CoterieConnector"


def known(version: str) -> bool:
    return any(version == minor or version.startswith(f"{minor}.") for minor in KNOWN_VERSIONS)


def register() -> None:
    """Register the connector and the policy; vLLM calls this at process start, possibly more than once."""
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME in KVConnectorFactory._registry:
        return
    module, eplb = "coterie.engines.vllm.connector", os.environ.get(EPLB_VARIABLE)
    if not known(vllm.__version__):
        logging.getLogger("vllm.coterie").warning(
            "coterie: vLLM %s is not known to this version of Coterie (known: %s); %s does nothing, the engine runs as "
            "if it were absent",
            vllm.__version__,
            ", ".join(KNOWN_VERSIONS),
            NAME,
        )
        module, eplb = "coterie.engines.vllm.inert", None
    if eplb is not None:
        from coterie.engines.vllm.eplb import install
        from coterie.engines.vllm.settings import EplbSettings

        install(EplbSettings.parse(eplb))
    KVConnectorFactory.register_connector(NAME, module, NAME)
