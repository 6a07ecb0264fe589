"""Moving experts to the ranks that ask for them, and what replicas cost in KV cache."""
