"""Compiled loops for the search of a layer over scenarios."""
