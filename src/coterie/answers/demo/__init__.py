"""The demo: record, fit and route on a fleet of real workers."""
