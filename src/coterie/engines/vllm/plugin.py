"""vLLM's entry point (``vllm.general_plugins``): gives vLLM the name CoterieConnector, in every process.

Nothing else happens unless ``--kv-transfer-config`` names it. A vLLM whose interfaces were never tried gets a connector
of the same name that does nothing: the engine runs as if the plugin were absent, and the log says so.
"""

from __future__ import annotations

import logging

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
    module = "coterie.engines.vllm.connector"
    if not known(vllm.__version__):
        logging.getLogger("vllm.coterie").warning(
            "coterie: vLLM %s is not known to this version of Coterie (known: %s); %s does nothing, the engine runs as "
            "if it were absent", vllm.__version__, ", ".join(KNOWN_VERSIONS), NAME,
        )  # fmt: skip
        module = "coterie.engines.vllm.inert"
    KVConnectorFactory.register_connector(NAME, module, NAME)
