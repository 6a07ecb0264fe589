"""Traffic that changes under a fitted router: with the live loop, without it, and with a fresh fit at every change."""
