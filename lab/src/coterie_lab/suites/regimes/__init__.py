"""Where each batch selection strategy helps and where it hurts."""
