"""Clients of the field against a gateway: what works, what is refused, and by whom."""
