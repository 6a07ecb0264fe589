"""CAPS: batch selection by predicted expert load."""
