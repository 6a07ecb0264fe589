"""Co-clustering: place experts and the items that activate them on the same ranks.

An *item* is the unit that is assigned to a rank: a token id with tensor-parallel attention (one rank per layer), a
request with data-parallel attention (one rank for all layers). An activation whose expert is on its item's rank is
local and needs no communication.
"""

from coterie.placement.co_clustering.base import ITEMS_HINT, CoClusters, Items, cost, local_activations, placed_ranks

__all__ = ["ITEMS_HINT", "CoClusters", "Items", "cost", "local_activations", "placed_ranks"]
