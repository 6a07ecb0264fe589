"""Savings of every router on a fleet: the same requests, simulated under each router."""
