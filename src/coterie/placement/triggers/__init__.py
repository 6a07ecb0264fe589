"""Triggers of placement changes: drift estimation, rebalancing rounds, and actions driven by demand."""
