"""Load for any OpenAI-compatible server: workloads, a streaming client, percentiles with intervals, comparisons."""
