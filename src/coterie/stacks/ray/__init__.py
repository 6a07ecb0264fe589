"""Ray Serve: decode replicas chosen by their experts, behind an ingress that prefills first. See docs/stacks/ray.md.

ledger     replicas and requests in a fleet keeper, in Serve's order of events; needs no Ray
router     the request router, `coterie.stacks.ray.router.ExpertRouter`
ingress    prefill, then decode, with retries before the first byte
installed  what is imported from Ray, and the message where it is missing
"""
