"""Moving experts while serving: transfer rounds and the migration state machine."""
