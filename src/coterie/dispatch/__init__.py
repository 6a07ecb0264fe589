"""Tokens to ranks: which rank takes a request, a token or an activation. Pure schedules on plain arrays."""
