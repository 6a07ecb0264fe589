"""What-if runs of batch selection on a user's trace."""
