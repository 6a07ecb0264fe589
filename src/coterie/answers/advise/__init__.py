"""Advice on a user's own traffic: which decisions to turn on, what each gains, and what does not pay."""
