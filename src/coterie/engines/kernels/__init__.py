"""Kernels of an expert-parallel layer, in Triton on CUDA and in plain torch elsewhere, with equal results.

``routing`` sorts a batch's activations by expert and copies its hidden rows into that order; ``rows`` gathers rows by
index. Both only count and copy: results equal the torch form bit for bit, and two runs give the same bytes.
"""
