"""Coterie's decisions inside the serving stacks of others: each package is another front of a gateway."""
