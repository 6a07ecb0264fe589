"""Fleets of prefill and decode workers: any router, every decode step with its recorded experts."""
