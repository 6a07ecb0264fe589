"""Code that needs torch or a serving engine. Importing these modules imports neither; using them does."""
