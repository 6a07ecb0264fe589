"""vLLM's entry point (``vllm.general_plugins``): registers CoterieConnector in every process.

Nothing else happens unless ``--kv-transfer-config`` names the connector or the environment sets the EPLB policy. A
feature whose interfaces this vLLM lacks is left out, and the log says so: the connector does nothing then, and vLLM
keeps its own policy (:mod:`coterie.engines.vllm.interfaces`).

Imports as little as possible: vLLM's CPU workers inspect every loaded module at start and fail on llvmlite's.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from coterie.engines.vllm import EPLB_VARIABLE
from coterie.engines.vllm.interfaces import fits

NAME = "CoterieConnector"
INERT = f"{NAME} does nothing"


def register() -> None:
    """Register the connector and the policy; vLLM calls this at process start, possibly more than once."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if NAME not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(NAME, __name__, NAME)
    except (ImportError, AttributeError, TypeError):
        fits("connector", INERT)  # logs what is missing
    eplb = os.environ.get(EPLB_VARIABLE)
    if eplb is not None and fits("EPLB policy", "vLLM rearranges the experts by its own policy"):
        from coterie.engines.vllm.eplb import install
        from coterie.engines.vllm.settings import EplbSettings

        install(EplbSettings.parse(eplb))


def __getattr__(name: str) -> Any:
    """Return the connector, which vLLM takes from this module when a configuration names it."""
    if name != NAME:
        raise AttributeError(name)
    module = "coterie.engines.vllm.connector" if fits("connector", INERT) else "coterie.engines.vllm.inert"
    return getattr(import_module(module), NAME)
