"""The command line: `verbs/` has one file per verb; what they share is beside it."""
