"""The live driver of the control loop: expert events of the workers in, swaps of the router and placement advice out.

The loop (:mod:`coterie.control`) runs in a process of its own, so that fitting and scoring never delay a request:

    workers' expert events -> process (streams, matching, loop, fits) -> messages -> LiveControl -> router of the pool
"""
