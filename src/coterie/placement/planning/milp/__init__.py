"""One layer's placement as a mixed-integer program: see :mod:`coterie.placement.planning.milp.program`."""
