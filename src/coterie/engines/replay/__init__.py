"""Decode batches that routers formed, run through real MoE layers."""
