"""Placements on disk, in Coterie's format and in those of engines."""
