"""Placement files in Coterie's own format and in the formats of engines."""
