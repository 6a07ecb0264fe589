"""Network helpers shared by engines and the gateway: HTTP client and server, access keys, server processes."""
