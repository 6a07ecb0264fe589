"""Verbs that serve, or send requests to a server."""
