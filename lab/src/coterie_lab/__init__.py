"""Coterie's laboratory: suites that reproduce published systems, and benchmarks of Coterie itself.

``coterie evaluate`` and ``coterie bench`` find them by the entry points of this package, as they find anyone's.
"""
