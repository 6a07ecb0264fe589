"""Measurement of a device for the step-time model: kernels, copies and collectives."""
