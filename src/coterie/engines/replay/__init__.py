"""Replay of routers' decode batches through real MoE layers."""
