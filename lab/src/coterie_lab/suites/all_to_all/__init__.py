"""All-to-all traffic of expert parallelism, beside a published estimate."""
