"""Moving experts while serving: transfer rounds, the migration state machine, and the memory budget of replicas."""
