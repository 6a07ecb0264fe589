"""The search of a layer over scenarios; loops on plain arrays."""
