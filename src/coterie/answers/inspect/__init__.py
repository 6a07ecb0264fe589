"""Inspection of a trace: statistics, sections of the report, and the verdict."""
