"""The live driver of the control loop: reads workers' expert events, swaps the router's fit, advises on placement.

The loop (:mod:`coterie.control`) runs in a process of its own, so that fitting and scoring never delay a request:

    workers' expert events -> process (streams, matching, loop, fits) -> messages -> LiveControl -> router of the pool
"""
