"""Coterie: expert-aware scheduling for Mixture-of-Experts serving."""

from coterie.errors import CoterieError
from coterie.types import ModelSpec, Placement, Topology

__version__ = "0.1.0"

__all__ = ["CoterieError", "ModelSpec", "Placement", "Topology", "__version__"]
