"""Synthetic workloads in which a request's experts depend on its domain.

Arrivals are from :mod:`coterie.traces.arrivals`: Poisson, semantic bursts (many requests of one domain in a short
time), or the times of a recorded trace. This module draws the experts of each request. The experts form a ring, and
each domain prefers an arc of it. Neighbouring domains share experts if arcs are longer than the distance of domains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.batching.base import Loads
from coterie.errors import ConfigError, check, check_at_least, check_positive, check_share


@dataclass(frozen=True, slots=True)
class SemanticLoads:
    """Distribution of the experts of a request, given its domain."""

    num_experts: int = 60
    top_k: int = 4
    domains: int = 20
    hot: int = 4
    """Number of experts that a domain prefers."""
    strength: float = 0.8
    """Share of a domain's activations on its preferred experts; the rest is spread evenly over all experts."""
    likeness: float = 40.0
    """Similarity of a domain's requests: concentration of the Dirichlet distribution from which a request draws its
    expert shares, with the domain's shares as the mean."""
    tokens: float = 64.0
    """Mean number of tokens of a request."""
    tokens_sigma: float = 0.1
    """Standard deviation of the logarithm of the tokens."""

    def __post_init__(self) -> None:
        check(1 <= self.top_k <= self.num_experts, f"top_k={self.top_k} must be in 1 … num_experts={self.num_experts}")
        check(1 <= self.hot <= self.num_experts, f"hot={self.hot} must be in 1 … num_experts={self.num_experts}")
        check_at_least(1, domains=self.domains)
        check_share(strength=self.strength)
        check_positive(tokens=self.tokens)
        # Below 1, most shares underflow and requests become even.
        check(1 <= self.likeness < math.inf, f"likeness={self.likeness} must be a finite number of at least 1")
        check(0 <= self.tokens_sigma < 10, f"tokens_sigma={self.tokens_sigma} must be in 0 … 10")

    @property
    def mix(self) -> NDArray[np.float64]:
        """[domain] share of the requests: equal for all domains."""
        return np.full(self.domains, 1.0 / self.domains)

    def profiles(self) -> NDArray[np.float64]:
        """Return [domain, expert] the share of the domain's activations on the expert."""
        profiles = np.full((self.domains, self.num_experts), (1.0 - self.strength) / self.num_experts)
        for domain in range(self.domains):
            arc = (round(domain * self.num_experts / self.domains) + np.arange(self.hot)) % self.num_experts
            profiles[domain, arc] += self.strength / self.hot
        return profiles

    def draw(self, domain: NDArray[np.int64], rng: Generator) -> Loads:
        """Draw [request, 1, expert] tokens, whole numbers, for requests of the given domains."""
        if domain.size and not 0 <= domain.min() <= domain.max() < self.domains:
            raise ConfigError(f"domain holds {domain.min()} … {domain.max()}; it must be in 0 … {self.domains - 1}")
        sigma = self.tokens_sigma
        tokens = rng.lognormal(math.log(self.tokens) - sigma * sigma / 2, sigma, len(domain))
        activations = np.maximum(1, np.rint(tokens)).astype(np.int64) * self.top_k
        own = rng.standard_gamma(self.profiles()[domain] * self.likeness) + 1e-12
        own /= own.sum(axis=1, keepdims=True)
        return rng.multinomial(activations, own).astype(np.float64)[:, None, :]
