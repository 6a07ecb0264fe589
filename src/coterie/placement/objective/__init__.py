"""What every planner minimises, and the arrays its loops work on.

    total = horizon x sum over layers of max over ranks of processing(rank)
          +           sum over layers of exposed x max over ranks of movement(rank)
          + planning

A rank's processing in a layer is the sum over its slots of ``unit[rank, expert] x share[expert, replicas]``: what the
expert would take if all its tokens came to this rank (compute at the rank's speed, streaming where that shows, the
exchange of rows from where they are), times what is left of it when replicas share the tokens. Shares other than equal
ones are priced from the same table, on straight lines between whole numbers of replicas. Movement is a weighted
Hamming distance: only an expert that is loaded where it was not costs, by the link from its cheapest source. Layers
are moved one after the other, each rank receiving one expert at a time.

Two settings trade balance for moves: a layer within `target_balance` of even gains nothing from being evener, and
`move_price` charges each move a share of its link time on top of the slowest rank's. Wrong where rows of one window are
not like those of the next: score plans on the next one.
"""

from coterie.placement.moves import settle
from coterie.placement.objective.problem import DEEPSEEK_V3_PREFILL, PRICES_HINT, Objective, Problem, Score

__all__ = ["DEEPSEEK_V3_PREFILL", "PRICES_HINT", "Objective", "Problem", "Score", "settle"]
