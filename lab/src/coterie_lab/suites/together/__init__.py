"""All decisions together, under one objective, by fleet, load, traffic and configuration (docs/results/together.md)."""
