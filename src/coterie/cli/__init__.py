"""The command line: one file per verb, each of which parses, calls the library and prints."""
