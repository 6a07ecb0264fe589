"""The verbs: one file each. A verb parses, calls the library and prints."""
