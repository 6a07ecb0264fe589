"""The workers of a live fleet: running requests, health, routing and the waiting line. Independent of HTTP."""
