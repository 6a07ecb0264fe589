"""vLLM's entry point (``vllm.general_plugins``): gives vLLM the name CoterieConnector, in every process.

Nothing else happens unless ``--kv-transfer-config`` names it, or the environment asks for the EPLB policy. A vLLM whose
interfaces were never tried gets a connector of the same name that does nothing, and keeps its own policy: the engine
runs as if the plugin were absent, and the log says so.

Imports next to nothing: vLLM's CPU workers go through every loaded module as they start, and stumble over llvmlite's.
"""

from __future__ import annotations

import logging
import os

from coterie.engines.vllm import EPLB_VARIABLE

KNOWN_VERSIONS = ("0.32",)
"""Minor versions of vLLM whose interfaces were read and run."""

NAME = "CoterieConnector"


def known(version: str) -> bool:
    return any(version == minor or version.startswith(f"{minor}.") for minor in KNOWN_VERSIONS)


def register() -> None:
    """Called by vLLM when a process starts; may be called more than once."""
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
