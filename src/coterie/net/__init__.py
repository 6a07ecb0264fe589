"""Helpers of engines and the gateway: an HTTP client, and servers as processes."""
