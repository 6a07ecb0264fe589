"""Suites: one folder for each published system or open question. The contract is in :mod:`.base`."""

from coterie.evaluation.suites.base import (
    Column,
    Report,
    Suite,
    SuiteOptions,
    SuiteResult,
    SuiteTable,
    load_suite,
    load_suites,
    options_read,
    suite_names,
    suites,
)

__all__ = [
    "Column",
    "Report",
    "Suite",
    "SuiteOptions",
    "SuiteResult",
    "SuiteTable",
    "load_suite",
    "load_suites",
    "options_read",
    "suite_names",
    "suites",
]
