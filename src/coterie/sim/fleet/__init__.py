"""Simulated fleets of prefill and decode workers, with any router; every decode step replays recorded experts."""
