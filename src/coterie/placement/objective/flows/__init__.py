"""Loops that share tokens over replicas so that the slowest rank is fastest, on plain arrays."""
