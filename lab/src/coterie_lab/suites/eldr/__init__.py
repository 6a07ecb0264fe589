"""ELDR: expert-locality decode routing, and routing past it."""
