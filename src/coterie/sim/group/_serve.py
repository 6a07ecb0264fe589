"""The compiled loop of a serving group: admission, steps of prompt and decoded tokens, and the time of the steps.

A lane is a queue of requests with its own attention batch: one lane per rank with data-parallel attention, a single
lane with tensor-parallel attention. All lanes step together.

The loop stops between two steps and goes on from there: a router chooses a rank, a placement changes, weights move.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.costs.composition import Floats, Ints, StepTables, layers_us, step_us
from coterie.sim.group.step import SlotTables, dispatch

START, REST, EXPERTS, EXCHANGE, RING, MOVES, REMOTE, ACTIVATIONS, DECODED, PROMPT, ACTIVE, BALANCE = range(12)
"""Columns of the step log: start in seconds, five durations in microseconds, counts of activations and tokens, active
slots and balancedness, both means over layers."""
ARRIVED, ENDED, STEPS = range(3)
"""Indices of `Progress.counts`."""
HEAD, TAIL, QUEUED, PRESENT, RUNNING, WAITING, KV_USED, CAPACITY, KV_MOST = range(9)
"""Rows of `Progress.lanes`: first and last waiting request, or -1; requests that wait, that wait or run, and that run;
prompt tokens left to compute; KV memory in use, there is, and most in use so far, in tokens."""
OVER, DECIDE, GROW, FITS = range(4)
"""Why the loop stops: all requests are served or `until_s` is reached; the next request needs a lane; the log is full;
the KV memory in use fits the capacity."""
IN_ORDER = -1
"""Predicted rank of a token without a prediction: it gets the first rank with room."""


class Replayed(NamedTuple):
    """Requests of a run and the recordings that they replay."""

    arrival_s: Floats
    prompts: Ints
    """[request] prompt tokens."""
    outputs: Ints
    recorded: Ints
    ids: NDArray[np.integer]
    """[row, layer, k] experts of the recordings' tokens."""
    prompt_row: Ints
    prompt_rows: Ints
    decode_row: Ints
    decode_rows: Ints
    predicted: Ints
    """[layer, row] predicted rank of a token; empty with data-parallel attention."""


class Progress(NamedTuple):
    """What a group has done between two steps; the loop changes it in place."""

    clock: Floats
    """[1] seconds."""
    counts: Ints
    first_s: Floats
    """[request] end of the step that gave the first token; NaN before."""
    finish_s: Floats
    decoded: Ints
    """[request] output tokens; -1 in the step that ends the prompt."""
    computed: Ints
    """[request] computed prompt tokens."""
    lane_of: Ints
    """[request] -1 until a router chooses it, unless it was given."""
    behind: Ints
    """[request] next request in the queue of its lane, or -1."""
    ended: Ints
    """[end] requests that were served or dropped, in order of time."""
    lanes: Ints
    active: Ints
    """[lane, place] running requests."""
    turns: Ints
    """[layer, expert] whose turn it is among an expert's slots."""
    asked: Floats
    """[rank, layer, expert] activations by the tokens' rank; empty if nobody asks for them."""

    @classmethod
    def start(cls, lane_of: Ints, lanes: int, places: int, capacity: int, asked: Floats) -> Progress:
        """Return the beginning of a run."""
        count = len(lane_of)
        begun = np.zeros((9, lanes), np.int64)
        begun[:2], begun[CAPACITY] = -1, capacity
        return cls(
            clock=np.zeros(1),
            counts=np.zeros(3, np.int64),
            first_s=np.full(count, np.nan),
            finish_s=np.full(count, np.nan),
            decoded=np.zeros(count, np.int64),
            computed=np.zeros(count, np.int64),
            lane_of=lane_of,
            behind=np.full(count, -1),
            ended=np.empty(count, np.int64),
            lanes=begun,
            active=np.empty((lanes, places), np.int64),
            turns=np.zeros(asked.shape[1:], np.int64),
            asked=asked,
        )


@njit()
def deal_layers(predicted: NDArray[np.integer], picked: Ints, count: int, ranks: int, home: Ints) -> None:
    """Fill home [layer, token] with ranks: the predicted rank while it has room; each rank has room for an equal share.

    Tokens whose predicted rank is full, and tokens without a prediction, go in order to the first rank with room.
    """
    room = np.empty(ranks, np.int64)
    for layer in range(len(home)):
        for rank in range(ranks):
            room[rank] = (count + ranks - 1) // ranks
        for token in range(count):
            wanted = np.int64(predicted[layer, picked[token]])
            home[layer, token] = IN_ORDER
            if wanted >= 0 and room[wanted] > 0:
                home[layer, token] = wanted
                room[wanted] -= 1
        free = 0
        for token in range(count):
            if home[layer, token] == IN_ORDER:
                while room[free] == 0:
                    free += 1
                home[layer, token] = free
                room[free] -= 1


@helper()
def _leave(state: Progress, request: int, lane: int) -> None:
    """Count a request out of its lane: it was served or dropped."""
    state.ended[state.counts[ENDED]] = request
    state.counts[ENDED] += 1
    state.lanes[PRESENT, lane] -= 1


@helper()
def _arrive(state: Progress, request: int, lane: int, prompt: int) -> None:
    lanes = state.lanes
    if lanes[HEAD, lane] < 0:
        lanes[HEAD, lane] = request
    else:
        state.behind[lanes[TAIL, lane]] = request
    lanes[TAIL, lane] = request
    lanes[QUEUED, lane] += 1
    lanes[PRESENT, lane] += 1
    lanes[WAITING, lane] += prompt
    state.counts[ARRIVED] += 1


@helper()
def _drop(state: Progress, work: Replayed) -> None:
    """Drop requests at the head of a queue that are larger than all KV memory of their rank."""
    lanes = state.lanes
    for lane in range(lanes.shape[1]):
        while lanes[HEAD, lane] >= 0:
            request = lanes[HEAD, lane]
            if work.prompts[request] + work.outputs[request] <= lanes[CAPACITY, lane]:
                break
            lanes[HEAD, lane] = state.behind[request]
            lanes[QUEUED, lane] -= 1
            lanes[WAITING, lane] -= work.prompts[request]
            _leave(state, request, lane)


@helper()
def _admit(state: Progress, work: Replayed, lane: int, places: int, piece: int, budget: int) -> bool:
    """Start the next waiting request if there are a place, KV memory and tokens for its first piece."""
    lanes, request = state.lanes, state.lanes[HEAD, lane]
    if request < 0 or lanes[RUNNING, lane] == places or min(piece, work.prompts[request]) > budget:
        return False
    used = lanes[KV_USED, lane] + work.prompts[request] + work.outputs[request]
    if used > lanes[CAPACITY, lane]:
        return False
    state.active[lane, lanes[RUNNING, lane]] = request
    lanes[HEAD, lane] = state.behind[request]
    lanes[QUEUED, lane] -= 1
    lanes[RUNNING, lane] += 1
    lanes[KV_USED, lane] = used
    lanes[KV_MOST, lane] = max(lanes[KV_MOST, lane], used)
    return True


@helper()
def _end_step(state: Progress, work: Replayed, clock: float) -> None:
    lanes, active = state.lanes, state.active
    for lane in range(lanes.shape[1]):
        kept = 0
        for at in range(lanes[RUNNING, lane]):
            request = active[lane, at]
            if state.computed[request] == work.prompts[request]:
                if state.decoded[request] < 0:
                    state.decoded[request], state.first_s[request] = 1, clock
                else:
                    state.decoded[request] += 1
            if state.decoded[request] >= work.outputs[request]:
                state.finish_s[request] = clock
                lanes[KV_USED, lane] -= work.prompts[request] + work.outputs[request]
                _leave(state, request, lane)
            else:
                active[lane, kept] = request
                kept += 1
        lanes[RUNNING, lane] = kept


@helper()
def _slots_used(rows: Ints, ranks: int, entry: Floats) -> None:
    """Log the active slots and mean ÷ max rows of a rank, both means over layers."""
    layers, per_rank, active, balance = len(rows), rows.shape[1] // ranks, 0, 0.0
    for layer in range(layers):
        most, total = 0, 0
        for rank in range(ranks):
            mine = 0
            for slot in range(rank * per_rank, (rank + 1) * per_rank):
                mine += rows[layer, slot]
                active += rows[layer, slot] > 0
            most, total = max(most, mine), total + mine
        balance += total / (ranks * most) if most > 0 else 1.0
    entry[ACTIVE], entry[BALANCE] = active / layers, balance / layers


@njit()
def serve(
    state: Progress,
    work: Replayed,
    slots: SlotTables,
    tables: StepTables,
    links: Floats,
    routing: Floats,
    ring: Floats,
    spread: int,
    chunk: int,
    piece: int,
    deduplicate: bool,
    even: bool,
    rows: Ints,
    picked: Ints,
    home: Ints,
    log: Floats,
    until_s: float,
    exposed: float,
    moved_s: float,
    fits: bool,
) -> int:
    """Serve requests until all are done, or until the first step that would start at `until_s` or later.

    Return why the loop stops, and change `state` and the `log` of the steps. rows [layer, slot], picked [token] and
    home [1 or layer, token] are working memory. Prices are those of `GroupPrices`. With tensor-parallel attention
    `spread` ranks share a step's tokens, and the times routing [tokens] and ring [fixed, per token] are added. While
    weights move, until `moved_s`, steps get slower by the share `exposed` of the time that both take. With `fits`, also
    stop once all lanes use no more KV memory than their capacity.
    """
    arrival_s, ids, recorded, prompts, computed = work.arrival_s, work.ids, work.recorded, work.prompts, state.computed
    ranks, layers, top_k = slots.nearest.shape[1], ids.shape[1], ids.shape[2]
    tensor, lanes, active, running = len(work.predicted) > 0, state.lanes, state.active, state.lanes[RUNNING]
    places = active.shape[1]
    prompt, batch = np.empty(3, np.int64), np.empty(ranks, np.int64)
    crossing, parts = np.zeros((2, layers, ranks), np.int64), np.empty((2, layers))
    clock = state.clock[0]
    while True:
        while state.counts[ARRIVED] < len(recorded) and arrival_s[state.counts[ARRIVED]] <= clock:
            request = state.counts[ARRIVED]
            if state.lane_of[request] < 0:
                return DECIDE
            _arrive(state, request, state.lane_of[request], prompts[request])
        _drop(state, work)
        if fits and (lanes[KV_USED] <= lanes[CAPACITY]).all():
            return FITS
        if lanes[PRESENT].sum() == 0:  # no request is left in the group: jump to the next arrival
            arrived = state.counts[ARRIVED]
            if arrived == len(recorded) or arrival_s[arrived] > until_s:
                return OVER
            clock = arrival_s[arrived]
            state.clock[0] = clock
            continue
        if clock >= until_s:
            return OVER
        if state.counts[STEPS] == len(log):
            return GROW
        rows[:, :] = 0
        crossing[:, :, :] = 0
        rest, idle, count, decoding_all = 0.0, 1.0, 0, 0
        for lane in range(lanes.shape[1]):
            begun, context = count, 0
            for at in range(running[lane]):
                request = active[lane, at]
                if computed[request] == prompts[request]:
                    recording, number = recorded[request], state.decoded[request] - 1
                    picked[count] = work.decode_row[recording] + number % work.decode_rows[recording]
                    count, context = count + 1, context + prompts[request] + number
            decoding = count - begun
            budget = chunk - decoding
            prompt[0], prompt[1], prompt[2], at = 0, 0, 0, 0
            while True:  # running prompts in order, then waiting ones while places are free
                if at == running[lane] and not _admit(state, work, lane, places, piece, budget):
                    break
                request = active[lane, at]
                at += 1
                left = prompts[request] - computed[request]
                taken = min(left, budget)
                if taken < left:
                    taken -= taken % piece
                if taken <= 0:
                    continue
                prompt[0] += taken
                prompt[1] += computed[request]
                prompt[2] += 1
                first, length = work.prompt_row[recorded[request]], work.prompt_rows[recorded[request]]
                number = computed[request] % length
                for _ in range(taken):
                    picked[count] = first + number
                    count, number = count + 1, number + 1 if number + 1 < length else 0
                budget -= taken
                computed[request] += taken
                lanes[WAITING, lane] -= taken
                if taken == left:
                    state.decoded[request] = -1  # marks that the first token is produced at the end of this step
            lane_tokens = count - begun
            decoding_all += decoding
            if prompt[0] == 0:
                idle *= tables.padded[1, lane_tokens]
                lane_tokens = int(tables.padded[0, lane_tokens])
            if count > begun:
                mine = step_us(
                    tables.dense, tables.attention, 0.0, lane_tokens, decoding, context, prompt[0], prompt[1], prompt[2]
                )
                rest = max(rest, mine)
            if not tensor:
                batch[lane] = lane_tokens
                home[0, begun:count] = lane
        if tensor:
            deal_layers(work.predicted, picked, count, ranks, home)
        remote = dispatch(
            ids,
            picked,
            count,
            home,
            slots.nearest,
            slots.holders,
            slots.copies,
            state.turns,
            rows,
            crossing,
            state.asked,
            deduplicate,
        )
        around = 0.0
        if tensor:
            share = (count + spread - 1) // spread
            batch[:] = share
            rest += routing[share]
            around = ring[0] + ring[1] * (share * spread)
        if even:
            for layer in range(layers):
                crossing[1, layer, :] = (crossing[1, layer].sum() + ranks - 1) // ranks
        layers_us(tables.p, tables.experts, tables.blend, links, rows, crossing, batch, 1.0 - idle, even, parts)
        computing, exchange = 0.0, 0.0
        for number in range(layers):
            computing += parts[0, number]
            exchange += parts[1, number]
        taken_s = 1e-6 * (rest + computing + exchange + around)
        slower_s = 0.0
        if clock < moved_s:
            slower_s = min(taken_s * exposed / (1.0 - exposed), exposed * (moved_s - clock))
        entry = log[state.counts[STEPS]]
        entry[START], entry[REST], entry[EXPERTS], entry[EXCHANGE], entry[RING] = (
            clock,
            rest,
            computing,
            exchange,
            around,
        )
        entry[MOVES], entry[REMOTE], entry[ACTIVATIONS] = 1e6 * slower_s, remote, count * layers * top_k
        entry[DECODED], entry[PROMPT] = decoding_all, count - decoding_all
        _slots_used(rows, ranks, entry)
        state.counts[STEPS] += 1
        clock += taken_s + slower_s
        state.clock[0] = clock
        _end_step(state, work, clock)
