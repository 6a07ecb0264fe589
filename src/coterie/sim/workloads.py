"""Requests whose experts follow their domain: the load vectors of a synthetic workload.

Arrivals come from :mod:`coterie.traces.arrivals`: Poisson, semantic bursts (many requests of one domain in a short
time), or the times of a recorded trace. This module gives each request the experts of its domain. Domains lie on a ring
of experts: each prefers an arc of them, and neighbouring domains share some where arcs are longer than their distance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.batching.base import Loads
from coterie.errors import ConfigError, check_at_least, check_positive, check_share
from coterie.traces.arrivals import ArrivalProcess


@dataclass(frozen=True, slots=True)
class SemanticLoads:
    """How requests of a domain use experts."""

    num_experts: int = 60
    top_k: int = 4
    domains: int = 20
    hot: int = 4
    """Experts a domain prefers."""
    strength: float = 0.8
    """Share of a domain's activations that go to them; the others are spread evenly."""
    likeness: float = 40.0
    """Similarity of a domain's requests: the concentration of the Dirichlet distribution from which each draws its
    shares around the domain's."""
    tokens: float = 64.0
    """Mean tokens of a request."""
    tokens_sigma: float = 0.1
    """Standard deviation of the logarithm of the tokens."""

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(f"top_k={self.top_k} must be in 1 … num_experts={self.num_experts}")
        if not 1 <= self.hot <= self.num_experts:
            raise ConfigError(f"hot={self.hot} must be in 1 … num_experts={self.num_experts}")
        check_at_least(1, domains=self.domains)
        check_share(strength=self.strength)
        check_positive(tokens=self.tokens)
        if not 1 <= self.likeness < math.inf:  # below, most shares underflow and requests become even, not unlike
            raise ConfigError(f"likeness={self.likeness} must be a finite number of at least 1")
        if not 0 <= self.tokens_sigma < 10:
            raise ConfigError(f"tokens_sigma={self.tokens_sigma} must be in 0 … 10")

    @property
    def mix(self) -> NDArray[np.float64]:
        """[domain] share of the requests: equal."""
        return np.full(self.domains, 1.0 / self.domains)

    def profiles(self) -> NDArray[np.float64]:
        """[domain, expert] share of a domain's activations."""
        profiles = np.full((self.domains, self.num_experts), (1.0 - self.strength) / self.num_experts)
        for domain in range(self.domains):
            start = round(domain * self.num_experts / self.domains)
            arc = (start + np.arange(self.hot)) % self.num_experts
            profiles[domain, arc] += self.strength / self.hot
        return profiles

    def draw(self, domain: NDArray[np.int64], rng: Generator) -> Loads:
        """[request, 1, expert] tokens, whole numbers."""
        if domain.size and not 0 <= domain.min() <= domain.max() < self.domains:
            raise ConfigError(f"domain holds {domain.min()} … {domain.max()}; it must be in 0 … {self.domains - 1}")
        sigma = self.tokens_sigma
        tokens = rng.lognormal(math.log(self.tokens) - sigma * sigma / 2, sigma, len(domain))
        activations = np.maximum(1, np.rint(tokens)).astype(np.int64) * self.top_k
        own = rng.standard_gamma(self.profiles()[domain] * self.likeness) + 1e-12
        own /= own.sum(axis=1, keepdims=True)
        return rng.multinomial(activations, own).astype(np.float64)[:, None, :]


class SemanticWorkload(NamedTuple):
    """Requests in order of arrival."""

    arrival_s: NDArray[np.float64]
    domain: NDArray[np.int64]
    loads: Loads
    """[request, 1, expert] tokens."""


def draw_workload(arrivals: ArrivalProcess, loads: SemanticLoads, requests: int, rng: Generator) -> SemanticWorkload:
    arrived = arrivals.draw(requests, loads.mix, rng)
    return SemanticWorkload(arrived.arrival_s, arrived.domain, loads.draw(arrived.domain, rng))
