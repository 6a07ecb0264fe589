"""The step-time model: what a step costs, fitted to kernels measured on real devices. See docs/costs.md."""
