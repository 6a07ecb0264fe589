"""What engines and the gateway share to reach servers: an HTTP client, and servers as processes."""
