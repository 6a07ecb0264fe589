"""What is under src/ is a package that a test installs, and holds no tests."""

collect_ignore = ["src"]
