"""Latency-optimal load balancing: plans, the interval sweep, shifting loads."""
