"""Everything that needs torch or an engine. Importing a module here imports neither; using it does."""
