"""Routing signals that are not in a request itself: its token ids, cached prefixes, expected footprint."""
