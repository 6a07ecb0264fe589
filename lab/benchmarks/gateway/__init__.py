"""Added latency and throughput of gateways in front of canned workers, side by side."""
