"""Co-clustering: experts and the items that activate them, dealt to the same ranks.

An *item* is what has a rank of its own: a token id where attention is tensor parallel (one rank per layer), a request
where it is data parallel (one rank for all layers). An activation whose expert is on its item's rank is local: it sends
nothing.
"""

from coterie.placement.co_clustering.base import (
    ITEMS_HINT,
    CoClusters,
    Items,
    cost,
    local_activations,
    median_imbalance,
    placed_ranks,
)

__all__ = ["ITEMS_HINT", "CoClusters", "Items", "cost", "local_activations", "median_imbalance", "placed_ranks"]
