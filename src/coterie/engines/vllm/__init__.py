"""Coterie inside vLLM, as a KV connector and a scheduler class: no patch, no fork, inactive unless configured.

    process              function                                                           module
    worker (rank 0)      a hook in every MoE layer, one write a step to the position store  capture
    engine core          reads a finished request's positions: footprint, expert events     connector, publisher
    API server           Prometheus metrics                                                 metrics
    engine core          the order in which waiting requests are admitted, if chosen        scheduler, waiting

`plugin` is vLLM's entry point. `interfaces` lists what each feature needs of vLLM: where it is missing, the feature is
left out, and vLLM gets a connector of the same name that does nothing. See docs/engines/vllm.md.
"""

EPLB_VARIABLE = "COTERIE_EPLB"
"""Environment variable with the EPLB policy's settings, as a JSON object; if unset, vLLM keeps its own policy."""
