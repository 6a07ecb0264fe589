"""The dashboard: one page that the gateway serves itself, and the stream of snapshots that it shows."""
