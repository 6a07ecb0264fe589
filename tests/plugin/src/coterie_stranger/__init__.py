"""Policies of a stranger: each keeps Coterie's contract, and none claims to be good."""
