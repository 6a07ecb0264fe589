"""Shares of an expert's tokens that each of its replicas computes."""
