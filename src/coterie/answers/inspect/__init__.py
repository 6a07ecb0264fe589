"""Inspecting a trace: numbers, sections of the report."""
