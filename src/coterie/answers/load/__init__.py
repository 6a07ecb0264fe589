"""Load tests of any OpenAI-compatible server: workloads, a streaming client, percentiles, comparisons."""
