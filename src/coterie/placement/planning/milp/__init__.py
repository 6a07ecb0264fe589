"""The placement of one layer as a mixed-integer program: see :mod:`coterie.placement.planning.milp.program`."""
