"""Moving experts while serving: rounds, the state machine, memory."""
