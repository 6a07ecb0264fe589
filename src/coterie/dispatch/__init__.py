"""Dispatch: assign requests, tokens and activations to ranks. Pure functions of plain arrays."""
