"""Compiled loops that split tokens over replicas so that the slowest rank takes the least time."""
