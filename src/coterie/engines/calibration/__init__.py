"""Measuring a device: kernels, copies and collectives, for the step-time model."""
