"""Environment variables that the plugin reads. Imports nothing: vLLM loads it in every process."""

EPLB_VARIABLE = "COTERIE_EPLB"
"""Settings of the EPLB policy, as a JSON object; unset, vLLM keeps its own."""
