"""Coterie inside vLLM, as a KV connector and a scheduler class: no patch, no fork, nothing unless it is configured.

    process              what runs there                                                    module
    worker (rank 0)      a hook in every MoE layer, one write a step to the position store  capture
    engine core          reads a finished request's positions: footprint, expert events     connector, publisher
    API server           Prometheus metrics                                                 metrics
    engine core          the order in which waiting requests are admitted, if chosen        scheduler, waiting

`plugin` is vLLM's entry point: it gives vLLM the connector's name, or, where it does not know the version of vLLM, a
connector of that name which does nothing. See docs/engines/vllm.md.
"""

EPLB_VARIABLE = "COTERIE_EPLB"
"""Environment variable with the settings of the EPLB policy, as a JSON object; unset, vLLM keeps its own."""
