"""Cases of the expert-parallel layer, run by every rank of a group, beside the same layer on one device.

`exact` cases have small whole numbers and a ReLU: every sum is exact in float32, so whatever order it has the bits must
be those of the dense layer. `float64` and `float32` cases are what a model would have: SiLU, softmax, RMS norm.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from coterie.dispatch.shuffle import PADDING, ShuffleSchedule, shuffle_schedule
from coterie.dispatch.slots import SlotTable, choose_slots
from coterie.engines.ranks import RankMember
from coterie.engines.torch_ep.group import Group
from coterie.engines.torch_ep.layer import (
    ExpertParallelLayers,
    RouterAnswer,
    SlotWeights,
    TorchExchange,
    shuffle_rows,
    shuffled_experts,
    shuffled_reduce_scatter,
)
from coterie.types import Placement

EXPERTS, TOP_K, HIDDEN, INNER, LAYERS = 16, 3, 16, 12, 2
NUMBERS = {"exact": torch.float32, "float32": torch.float32, "float64": torch.float64}
GATE = torch.from_numpy(np.random.default_rng(5).integers(-1, 2, (HIDDEN, EXPERTS))).to(torch.float64)


class Case(NamedTuple):
    name: str
    counts: str
    """How tokens are spread over ranks."""
    routing: str = "random"
    replicas: int = 0
    """Slots of each rank beyond its share of experts."""
    numbers: str = "exact"


DATA_PARALLEL = (
    Case("even", "even"),
    Case("uneven", "uneven"),
    Case("uneven, float64", "uneven", numbers="float64"),
    Case("uneven, float32", "uneven", numbers="float32"),
    Case("all tokens on one rank", "one"),
    Case("no tokens", "none"),
    Case("all experts on one rank", "uneven", routing="rank 1"),
    Case("one expert", "even", routing="expert 0"),
    Case("replicas", "uneven", replicas=2),
    Case("replicas, float64", "uneven", replicas=2, numbers="float64"),
    Case("replicas, all experts on one rank", "one", routing="rank 1", replicas=1),
)
TENSOR_PARALLEL = (
    Case("as predicted", "29"),
    Case("as predicted, float64", "29", numbers="float64"),
    Case("as predicted, float32", "29", numbers="float32"),
    Case("all predicted for one rank", "17", routing="rank 1"),
    Case("fewer tokens than ranks", "1"),
    Case("no tokens", "0"),
    Case("in turn", "24", routing="in turn"),
    Case("replicas", "40", replicas=2),
)


@cache
def load_expert(numbers: str) -> Callable[[int, int], tuple[Any, Any]]:
    @cache
    def load(layer: int, expert: int) -> tuple[Any, Any]:
        rng = np.random.default_rng([layer, expert])
        shapes = (2 * INNER, HIDDEN), (HIDDEN, INNER)
        made = [rng.integers(-1, 2, shape) if numbers == "exact" else rng.normal(0, 0.3, shape) for shape in shapes]
        up, down = (torch.from_numpy(values).to(NUMBERS[numbers]) for values in made)
        return up, down

    return load


def dense(layer: int, hidden: Any, experts: Any, weights: Any, numbers: str) -> Any:
    """The layer on one device: each token's experts in the order of its top-k."""
    load, out = load_expert(numbers), torch.zeros_like(hidden)
    for place in range(TOP_K):
        given = torch.zeros_like(hidden)
        for expert in range(EXPERTS):
            rows = experts[:, place] == expert
            up, down = load(layer, expert)
            gate, value = (hidden[rows] @ up.T).chunk(2, dim=1)
            activated = torch.relu(gate) if numbers == "exact" else torch.nn.functional.silu(gate)
            given[rows] = (activated * value) @ down.T
        out += given * weights[:, place, None]
    return out


def placement_of(case: Case, world: int, rng: np.random.Generator) -> Placement:
    slots = EXPERTS + case.replicas * world
    rows = [np.concatenate([np.arange(EXPERTS), rng.integers(0, EXPERTS, slots - EXPERTS)]) for _ in range(LAYERS)]
    return Placement(rng.permuted(np.array(rows), axis=1).astype(np.int32), world, EXPERTS)


def tokens_per_rank(case: Case, world: int, rng: np.random.Generator) -> list[int]:
    match case.counts:
        case "even":
            return [7] * world
        case "uneven":
            return [0, *rng.integers(1, 20, world - 1).tolist()]
        case "one":
            return [0] * (world - 1) + [23]
        case _:
            return [0] * world


def make_layers(group: Group, placement: Placement, numbers: str, deduplicate: bool) -> ExpertParallelLayers:
    weights = SlotWeights(
        placement, group.rank, load_expert(numbers), activation="relu" if numbers == "exact" else "silu"
    )
    return ExpertParallelLayers(
        group, placement, weights, TorchExchange(group, placement.slots_per_rank, deduplicate=deduplicate)
    )


def hidden_rows(rows: int, numbers: str, rng: np.random.Generator) -> Any:
    values = rng.integers(-2, 3, (rows, HIDDEN)) if numbers == "exact" else rng.normal(0, 1, (rows, HIDDEN))
    return torch.from_numpy(values).to(NUMBERS[numbers])


def routing(case: Case, rows: int, placement: Placement, layer: int, rng: np.random.Generator) -> tuple[Any, Any]:
    """[token, k] experts and weights; powers of 2 where sums must be exact."""
    keys = rng.random((rows, EXPERTS))
    if case.routing == "rank 1":
        block = placement.slot_experts[layer, placement.slots_per_rank : 2 * placement.slots_per_rank]
        keys[:, np.unique(block)] += 1
    elif case.routing == "expert 0":
        keys[:, 0] += 1
    experts = torch.from_numpy(np.argsort(-keys, axis=1)[:, :TOP_K].copy())
    weights = 2.0 ** -rng.integers(0, 3, (rows, TOP_K)) if case.numbers == "exact" else rng.random((rows, TOP_K))
    return experts, torch.from_numpy(weights).to(NUMBERS[case.numbers])


def predicted_rows(experts: np.ndarray, homes: np.ndarray, placement: Placement, layer: int, deduplicate: bool) -> int:
    """Rows that cross ranks in one direction."""
    table = SlotTable.of(placement.slot_experts[layer], EXPERTS, placement.num_ranks)
    to = np.empty_like(experts)
    for rank in range(placement.num_ranks):
        to[homes == rank] = choose_slots(experts[homes == rank], rank, table) // placement.slots_per_rank
    if not deduplicate:
        return int((to != homes[:, None]).sum())
    return sum(len(set(ranks) - {home}) for ranks, home in zip(to.tolist(), homes.tolist(), strict=True))


class Found(NamedTuple):
    """One case on one rank."""

    name: str
    deduplicate: bool
    numbers: str
    equal: bool
    """Bit by bit."""
    error: float
    scale: float
    sent: dict[str, int]
    """Bytes by counter."""
    predicted: int
    """Bytes of hidden states over the whole group, there and back."""
    predicted_block: int = 0
    """Bytes that each rank sends in reduce-scatters, and as many in gathers."""


def data_parallel(group: Group, case: Case, deduplicate: bool) -> Found:
    rng = np.random.default_rng([group.size, len(case.name)])
    placement = placement_of(case, group.size, rng)
    layers = make_layers(group, placement, case.numbers, deduplicate)
    counts = tokens_per_rank(case, group.size, rng)
    homes = np.repeat(np.arange(group.size), counts)
    own = torch.from_numpy(homes == group.rank)
    group.sent_bytes.clear()
    equal, error, scale, predicted = True, 0.0, 0.0, 0
    for layer in range(LAYERS):
        hidden = hidden_rows(len(homes), case.numbers, rng)
        experts, weights = routing(case, len(homes), placement, layer, rng)
        got = layers.forward(layer, hidden[own], experts[own], weights[own])
        reference = dense(layer, hidden, experts, weights, case.numbers)[own]
        equal &= torch.equal(got, reference)
        error, scale = max(error, largest(got - reference)), max(scale, largest(reference))
        rows = predicted_rows(experts.numpy(), homes, placement, layer, deduplicate)
        predicted += 2 * rows * HIDDEN * hidden.element_size()
    return Found(case.name, deduplicate, case.numbers, equal, error, scale, dict(group.sent_bytes), predicted)


def largest(values: Any) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def norm_of(numbers: str) -> Callable[[Any], Any]:
    if numbers == "exact":
        return lambda rows: rows.clamp(-2, 2)
    return lambda rows: rows * torch.rsqrt(rows.pow(2).mean(dim=1, keepdim=True) + 1e-6)


def route_of(numbers: str) -> Callable[[Any], RouterAnswer]:
    gate = GATE.to(NUMBERS[numbers])

    def route(rows: Any) -> RouterAnswer:
        logits = rows @ gate
        if numbers == "exact":
            experts = (logits * EXPERTS + torch.arange(EXPERTS)).topk(TOP_K).indices  # no ties
            return RouterAnswer(experts, (2.0 ** -torch.arange(TOP_K)).to(rows.dtype).expand(len(rows), -1))
        chosen = torch.softmax(logits, dim=1).topk(TOP_K)
        return RouterAnswer(chosen.indices, chosen.values / chosen.values.sum(dim=1, keepdim=True))

    return route


def in_turn_schedule(num_tokens: int, num_ranks: int) -> ShuffleSchedule:
    """Return the schedule that keeps the tokens' own order: a plain reduce-scatter."""
    per_rank = -(-num_tokens // num_ranks)
    order = np.arange(num_ranks * per_rank)
    order[num_tokens:] = PADDING
    return ShuffleSchedule(order, per_rank, np.arange(num_tokens))


def tensor_parallel(group: Group, case: Case, deduplicate: bool) -> Found:
    rng = np.random.default_rng([group.size, len(case.name), 1])
    world, tokens = group.size, int(case.counts)
    placement = placement_of(case, world, rng)
    layers = make_layers(group, placement, case.numbers, deduplicate)
    norm, route = norm_of(case.numbers), route_of(case.numbers)
    stream = own = hidden_rows(tokens, case.numbers, rng)
    group.sent_bytes.clear()
    equal, error, scale, predicted, blocks = True, 0.0, 0.0, 0, 0
    for layer in range(LAYERS):
        partials = [hidden_rows(tokens, case.numbers, rng) for _ in range(world)]
        ranks = np.ones(tokens, np.int64) if case.routing == "rank 1" else rng.integers(0, world, tokens)
        schedule = shuffle_schedule(ranks, world, rng.random(tokens))
        if case.routing == "in turn":
            schedule = in_turn_schedule(tokens, world)
        partial, early = partials[group.rank], layer == 1
        if early:  # as if the rows of the projection's input had been shuffled
            partial = shuffle_rows(partial, schedule)
        own = shuffled_experts(layers, layer, partial, own, schedule, norm=norm, route=route, already_shuffled=early)
        # The same on one device: partial sums added in the order of ranks, residual, norm, experts.
        summed = partials[0].clone()
        for other in partials[1:]:
            summed += other
        stream = summed + stream
        experts, weights = route(norm(stream))
        stream = stream + dense(layer, norm(stream), experts, weights, case.numbers)
        rows = predicted_rows(experts.numpy(), schedule.inverse // schedule.per_rank, placement, layer, deduplicate)
        predicted += 2 * rows * HIDDEN * stream.element_size()
        blocks += (world - 1) * schedule.per_rank * HIDDEN * stream.element_size()
        equal &= torch.equal(own, stream)
        error, scale = max(error, largest(own - stream)), max(scale, largest(stream))
        if case.numbers == "exact":
            own = stream = norm(stream)  # whole numbers stay small
    return Found(case.name, deduplicate, case.numbers, equal, error, scale, dict(group.sent_bytes), predicted, blocks)


def reduce_scatter_bits(group: Group) -> bool:
    """Random floats: the shuffle changes which rank sums a row, not how."""
    rng = np.random.default_rng(group.size)
    partials = [hidden_rows(31, "float32", rng) for _ in range(group.size)]
    schedule = shuffle_schedule(rng.integers(0, group.size, 31), group.size)
    summed = partials[0].clone()
    for other in partials[1:]:
        summed += other
    got = shuffled_reduce_scatter(group, partials[group.rank], schedule)
    return bool(torch.equal(got, summed[torch.from_numpy(schedule.tokens_of(group.rank))]))


def run_all(member: RankMember, _: None) -> dict[str, Any]:
    """Every case on this rank."""
    group = Group(timeout_s=member.timeout_s)
    member.say("the cases")
    found: dict[str, Any] = {
        "data parallel": [data_parallel(group, case, d) for case in DATA_PARALLEL for d in (True, False)],
        "tensor parallel": [tensor_parallel(group, case, d) for case in TENSOR_PARALLEL for d in (True, False)],
        "reduce-scatter bits": reduce_scatter_bits(group),
    }
    group.close()
    found["reopened"] = reopened(group.rank, member.timeout_s)
    return found


def reopened(rank: int, timeout_s: float) -> bool:
    """A second group of the same processes works, and watches again."""
    group = Group(timeout_s=timeout_s)
    ranks = group.all_gather(torch.tensor([rank]), "ranks").flatten().tolist()
    watching = group._watch.is_alive()
    group.close()
    return watching and ranks == list(range(group.size))
