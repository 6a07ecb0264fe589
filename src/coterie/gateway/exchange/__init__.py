"""One request through the fleet: chosen, sent, passed on. Nothing here parses HTTP from a client."""
