"""The objective that every planner minimises, and the arrays that planning loops use.

    total = horizon x sum over layers of max over ranks of processing(rank)
          +           sum over layers of exposed x max over ranks of movement(rank)
          + planning

A rank's processing in a layer is the sum over its slots of ``unit[rank, expert] x share[expert, replicas]``. `unit` is
the seconds of the expert if all its tokens came to this rank: compute at the rank's speed, reading of weights if it
limits the step, and the exchange of rows from their ranks. `share` is the part of `unit` that each replica takes if
replicas share the tokens. Unequal shares are priced by linear interpolation in the same table. Movement is a weighted
Hamming distance: an expert costs only if it is loaded onto a rank that does not hold it, by the link from its cheapest
source. Layers are moved one after another, and each rank receives one expert at a time.

Two settings trade balance for moves. A layer whose balance is `target_balance` or better gains nothing from more
balance. `move_price` charges each move a share of its link time, in addition to the time of the slowest rank. Wrong if
the next window differs from the one planned for: score plans on the next window.
"""

from coterie.placement.moves import settle
from coterie.placement.objective.problem import DEEPSEEK_V3_PREFILL, PRICES_HINT, Objective, Problem, Score

__all__ = ["DEEPSEEK_V3_PREFILL", "PRICES_HINT", "Objective", "Problem", "Score", "settle"]
