"""The step-time model: what a step costs, fitted to kernels measured on real devices. See docs/costs.md.

Each term stands once, as a function that compiled loops call too:

* :mod:`~coterie.costs.experts`: the experts of one layer on one device, from tokens per expert.
* :mod:`~coterie.costs.replicas`: how replicas of an expert share its tokens.
* :mod:`~coterie.costs.exchange`: the all-to-all between ranks.
* :mod:`~coterie.costs.attention`, :mod:`~coterie.costs.roofline`: attention and projections.
* :mod:`~coterie.costs.movement`: weights and caches over links.
* :mod:`~coterie.costs.composition`: how they make a step; :mod:`~coterie.costs.step`: the step model.
* :mod:`~coterie.costs.lines`: straight-line forms of it for policies.
* :mod:`~coterie.costs.roofline`: the laws of kernels, transfers and curves; :mod:`~coterie.costs.fit` and
  :mod:`~coterie.costs.presets` fit them to measured :mod:`~coterie.costs.cells`.
"""
