"""Observability of the gateway: metrics, last decisions, trace spans, log lines."""
