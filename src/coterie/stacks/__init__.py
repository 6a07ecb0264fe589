"""Coterie's routers inside serving stacks that fleets already run; one package for each, with an extra of its name."""
