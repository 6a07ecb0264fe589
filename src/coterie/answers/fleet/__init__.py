"""What every router would save on a fleet: the same requests, simulated under each router."""
