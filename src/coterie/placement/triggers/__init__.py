"""When to act: drift, rebalancing, demand, actions."""
