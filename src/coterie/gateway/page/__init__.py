"""The dashboard: one web page that the gateway serves, and the stream of snapshots that it shows."""
