"""The command line: `verbs/` has one file per verb; modules shared by verbs are in this folder."""
