"""The step-time model: the predicted time of a step, fitted to kernels measured on real devices. See docs/costs.md.

Each term is implemented once, as a function that compiled loops also call:

* :mod:`~coterie.costs.experts`: the experts of one layer on one device, from tokens per expert.
* :mod:`~coterie.costs.replicas`: how replicas of an expert share its tokens.
* :mod:`~coterie.costs.exchange`: the all-to-all between ranks.
* :mod:`~coterie.costs.attention`, :mod:`~coterie.costs.roofline`: attention and projections.
* :mod:`~coterie.costs.movement`: weights and caches over links.
* :mod:`~coterie.costs.composition`: adds the terms up to a step; :mod:`~coterie.costs.step`: the step model.
* :mod:`~coterie.costs.lines`: straight-line approximations of the step time for policies.
* :mod:`~coterie.costs.roofline`: fitted laws for kernels, transfers and measured curves; :mod:`~coterie.costs.fit` and
  :mod:`~coterie.costs.presets` fit them to measured :mod:`~coterie.costs.cells`.
"""
