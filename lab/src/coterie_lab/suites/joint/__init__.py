"""Joint routing by KV cache, experts and load, after the Dynamo article."""
