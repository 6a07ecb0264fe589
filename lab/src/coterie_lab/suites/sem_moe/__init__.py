"""Semantic parallelism (Sem-MoE): tokens and experts scheduled together, beside the published numbers."""
