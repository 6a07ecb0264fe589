"""Wire formats of engines, as pure functions on bytes, strings and arrays: no sockets, no files."""
