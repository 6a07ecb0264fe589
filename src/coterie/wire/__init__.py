"""What engines put on the wire, as pure functions on bytes, strings and arrays: no sockets, no files."""
