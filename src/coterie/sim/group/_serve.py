"""The compiled loop of a serving group: admission, steps of prompt and decoded tokens, and the time of the steps.

A lane is a queue of requests with its own attention batch: one lane per rank with data-parallel attention, a single
lane with tensor-parallel attention. All lanes step together.

The loop stops between two steps and goes on from there: a placement may change, and weights move, in between.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.costs.composition import Floats, Ints, StepTables, layers_us, step_us
from coterie.sim.group.prompts import PromptTables, deal_layers
from coterie.sim.group.step import SlotTables, dispatch

START, REST, EXPERTS, EXCHANGE, RING, MOVES, REMOTE, ACTIVATIONS, DECODED, PROMPT = range(10)
"""Columns of the step log: start in seconds, five durations in microseconds, then counts of activations and tokens."""


class Progress(NamedTuple):
    """What a group has done between two steps; the loop changes it in place."""

    clock: Floats
    """[1] seconds."""
    arrived: Ints
    """[1] number of requests that have arrived."""
    first_s: Floats
    """[request] end of the step that gave the first token; NaN before."""
    finish_s: Floats
    decoded: Ints
    """[request] output tokens; -1 in the step that ends the prompt."""
    pieces: Ints
    """[request] computed pieces of the prompt."""
    lane_of: Ints
    """[request] -1 until it arrives, unless it was given."""
    behind: Ints
    """[request] next request in the queue of its lane, or -1."""
    lanes: Ints
    """[6, lane] first and last waiting request, or -1; requests that wait, that wait or run, and that run; prompt
    pieces left to compute."""
    active: Ints
    """[lane, place] running requests."""
    turns: Ints
    """[layer, expert] whose turn it is among an expert's slots."""

    @classmethod
    def start(cls, lane_of: Ints, lanes: int, places: int, turns: tuple[int, int]) -> Progress:
        """Return the beginning of a run."""
        count = len(lane_of)
        begun = np.zeros((6, lanes), np.int64)
        begun[:2] = -1
        return cls(
            np.zeros(1),
            np.zeros(1, np.int64),
            np.full(count, np.nan),
            np.full(count, np.nan),
            np.zeros(count, np.int64),
            np.zeros(count, np.int64),
            lane_of,
            np.full(count, -1),
            begun,
            np.empty((lanes, places), np.int64),
            np.zeros(turns, np.int64),
        )


@helper()
def _add_piece(
    rows: Ints,
    crossing: Ints,
    piece_rows: NDArray[np.uint32],
    sent: NDArray[np.int32],
    got: NDArray[np.int32],
    home: int,
) -> None:
    """Add a piece of a prompt to the step; `home` is the rank of its tokens, or -1 if they are split over all ranks."""
    layers, ranks = crossing.shape[1], crossing.shape[2]
    for number in range(layers):
        for slot in range(rows.shape[1]):
            rows[number, slot] += np.int64(piece_rows[number, slot])
        for rank in range(ranks):
            if home < 0:
                crossing[0, number, rank] += sent[number, rank]
                crossing[1, number, rank] += got[number, rank]
            elif rank != home:
                crossing[0, number, home] += sent[number, rank]
                crossing[1, number, rank] += got[number, rank]


@helper()
def _longer(log: Floats) -> Floats:
    """Return a copy of the log with room for twice the steps."""
    longer = np.empty((2 * len(log), log.shape[1]))
    for step in range(len(log)):
        for column in range(log.shape[1]):
            longer[step, column] = log[step, column]
    return longer


@helper()
def _pick_lane(affinity: Floats, waiting: Ints, present: Ints, prompt: int, ahead: int) -> int:
    """Return the lane of highest affinity among the least busy ones; ties go to the lane with fewest requests.

    Least busy are the lanes without a prompt piece left to compute (`waiting`). If all have some, they are the lanes
    with less than `prompt` pieces more than the least. Lanes that have `ahead` requests more than the lane with fewest
    are excluded, unless that excludes all.
    """
    most, fewest = waiting.min(), present.min()
    if most > 0:
        most += prompt - 1
    room = False
    for lane in range(len(waiting)):
        room = room or (waiting[lane] <= most and present[lane] < fewest + ahead)
    best = -1
    for lane in range(len(waiting)):
        if waiting[lane] > most or (room and present[lane] >= fewest + ahead):
            continue
        better = best < 0 or affinity[lane] > affinity[best]
        if better or (affinity[lane] == affinity[best] and present[lane] < present[best]):
            best = lane
    return best


@njit()
def serve(
    state: Progress,
    arrival_s: Floats,
    affinity: Floats,
    ahead: int,
    recorded: Ints,
    outputs: Ints,
    ids: NDArray[np.integer],
    decode_row: Ints,
    decode_rows: Ints,
    slots: SlotTables,
    predicted: NDArray[np.integer],
    prompts: PromptTables,
    tables: StepTables,
    links: Floats,
    routing: Floats,
    ring: Floats,
    spread: int,
    chunk: int,
    prompt_tokens: int,
    deduplicate: bool,
    until_s: float,
    exposed: float,
    moved_s: float,
) -> Floats:
    """Serve requests until all are done, or until the first step that would start at `until_s` or later.

    Return the log of the steps and change `state`. A request whose lane_of is -1 gets its lane on arrival, by affinity
    [recording, lane] (see `_pick_lane`). If predicted [layer, row] is not empty, attention is tensor parallel: `spread`
    ranks share a step's tokens, and the times routing [tokens] and ring [fixed, per token] are added. While weights
    move, until `moved_s`, steps get slower by the share `exposed` of the time that both take.
    """
    ranks, layers, top_k = slots.own.shape[1], ids.shape[1], ids.shape[2]
    piece_tokens = prompts.tokens
    tensor, pieces = len(predicted) > 0, len(piece_tokens)
    first_s, finish_s, decoded, done_pieces = state.first_s, state.finish_s, state.decoded, state.pieces
    lane_of, behind, active, arrived = state.lane_of, state.behind, state.active, state.arrived[0]
    head, tail, queued, present, running, waiting = (
        state.lanes[0],
        state.lanes[1],
        state.lanes[2],
        state.lanes[3],
        state.lanes[4],
        state.lanes[5],
    )
    lanes, places = active.shape
    picked = np.empty(lanes * places, np.int64)
    home = np.empty((layers if tensor else 1, lanes * places), np.int64)
    prompt, computed = np.empty(3, np.int64), np.empty(ranks, np.int64)
    rows, crossing = np.zeros((layers, prompts.rows.shape[3]), np.int64), np.zeros((2, layers, ranks), np.int64)
    parts, asked = np.empty((2, layers)), np.empty((0, layers, slots.own.shape[2]))
    log, steps, clock = np.empty((1024, 10)), 0, state.clock[0]
    while True:
        while arrived < len(recorded) and arrival_s[arrived] <= clock:
            if lane_of[arrived] < 0:
                lane_of[arrived] = _pick_lane(affinity[recorded[arrived]], waiting, present, pieces, ahead)
            lane = lane_of[arrived]
            if head[lane] < 0:
                head[lane] = arrived
            else:
                behind[tail[lane]] = arrived
            tail[lane] = arrived
            queued[lane] += 1
            present[lane] += 1
            waiting[lane] += pieces
            arrived += 1
        if present.sum() == 0:  # no request is left in the group: jump to the next arrival
            if arrived == len(recorded) or arrival_s[arrived] > until_s:
                break
            clock = arrival_s[arrived]
            continue
        if clock >= until_s:
            break
        rows[:, :] = 0
        crossing[:, :, :] = 0
        rest, idle, tokens, count, here, decoding_all = 0.0, 1.0, 0, 0, 0, 0
        for lane in range(lanes):
            decoding, context = 0, 0
            for at in range(running[lane]):
                request = active[lane, at]
                if done_pieces[request] == pieces:
                    recording, number = recorded[request], decoded[request] - 1
                    picked[count] = decode_row[recording] + number % decode_rows[recording]
                    if not tensor:
                        home[0, count] = lane
                    count, decoding, context = count + 1, decoding + 1, context + prompt_tokens + number
            budget = chunk - decoding
            prompt[0], prompt[1], prompt[2], at = 0, 0, 0, 0
            while True:  # running prompts in order, then waiting ones while places are free
                if at == running[lane]:
                    if running[lane] == places or head[lane] < 0 or piece_tokens[0] > budget:
                        break
                    active[lane, at] = head[lane]
                    head[lane] = behind[head[lane]]
                    queued[lane] -= 1
                    running[lane] += 1
                request = active[lane, at]
                begun = done_pieces[request]
                while done_pieces[request] < pieces and piece_tokens[done_pieces[request]] <= budget:
                    piece, recording = done_pieces[request], recorded[request]
                    if piece == begun:
                        prompt[1] += begun * piece_tokens[0]
                        prompt[2] += 1
                    _add_piece(
                        rows,
                        crossing,
                        prompts.rows[recording, piece],
                        prompts.sent[recording, piece],
                        prompts.got[recording, piece],
                        -1 if tensor else lane,
                    )
                    here += prompts.local[recording, piece, 0 if tensor else lane]
                    prompt[0] += piece_tokens[piece]
                    budget -= piece_tokens[piece]
                    done_pieces[request] += 1
                    waiting[lane] -= 1
                    if done_pieces[request] == pieces:
                        decoded[request] = -1  # marks that the first token is produced at the end of this step
                at += 1
            lane_tokens = decoding + prompt[0]
            tokens += lane_tokens
            decoding_all += decoding
            if prompt[0] == 0:
                idle *= tables.padded[1, lane_tokens]
                lane_tokens = int(tables.padded[0, lane_tokens])
            if decoding + prompt[0] > 0:
                mine = step_us(
                    tables.dense, tables.attention, 0.0, lane_tokens, decoding, context, prompt[0], prompt[1], prompt[2]
                )
                rest = max(rest, mine)
            if not tensor:
                computed[lane] = lane_tokens
        if tensor:
            deal_layers(predicted, picked, count, ranks, home)
        remote = dispatch(
            ids,
            picked,
            count,
            home,
            slots.own,
            slots.holders,
            slots.copies,
            state.turns,
            rows,
            crossing,
            asked,
            deduplicate,
        )
        remote += (tokens - decoding_all) * layers * top_k - here
        around = 0.0
        if tensor:
            share = (tokens + spread - 1) // spread
            computed[:] = share
            rest += routing[share]
            around = ring[0] + ring[1] * (share * spread)
        layers_us(tables.p, tables.experts, tables.blend, links, rows, crossing, computed, 1.0 - idle, parts)
        computing, exchange = 0.0, 0.0
        for number in range(layers):
            computing += parts[0, number]
            exchange += parts[1, number]
        taken_s = 1e-6 * (rest + computing + exchange + around)
        slower_s = 0.0
        if clock < moved_s:
            slower_s = min(taken_s * exposed / (1.0 - exposed), exposed * (moved_s - clock))
        if steps == len(log):
            log = _longer(log)
        log[steps, START], log[steps, REST], log[steps, EXPERTS] = clock, rest, computing
        log[steps, EXCHANGE], log[steps, RING], log[steps, REMOTE] = exchange, around, remote
        log[steps, MOVES] = 1e6 * slower_s
        log[steps, ACTIVATIONS], log[steps, DECODED] = tokens * layers * top_k, decoding_all
        log[steps, PROMPT] = tokens - decoding_all
        steps += 1
        clock += taken_s + slower_s
        for lane in range(lanes):
            kept = 0
            for at in range(running[lane]):
                request = active[lane, at]
                if done_pieces[request] == pieces:
                    if decoded[request] < 0:
                        decoded[request], first_s[request] = 1, clock
                    else:
                        decoded[request] += 1
                if decoded[request] >= outputs[request]:
                    finish_s[request] = clock
                    present[lane] -= 1
                else:
                    active[lane, kept] = request
                    kept += 1
            running[lane] = kept
    state.clock[0], state.arrived[0] = clock, arrived
    return log[:steps]
