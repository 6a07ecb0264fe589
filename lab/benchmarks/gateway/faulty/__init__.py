"""A gateway in front of an embedded fleet while things fail: see faults.py."""
