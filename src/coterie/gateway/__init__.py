"""The gateway: routes requests to the workers of a live fleet."""
