"""Following a worker's numbered messages: what is lost is fetched or forgotten, and no byte raises."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from books import check_directory
from coterie.engines.worker.blocks import BlockTable, block_digests
from coterie.engines.worker.events import EventStream
from coterie.errors import InputError, UnavailableError
from coterie.kvindex import Follower, KVDirectory, Replay
from coterie.wire.event_security import secure_subscriber
from coterie.wire.framing import REPLAY_END, Frame, from_frames
from coterie.wire.kv_events import (
    MAX_BLOCKS,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEvents,
    decode_kv_events,
    encode_kv_events,
)
from kv_reference import PROMPTS, SIZE, ReferenceDirectory, blocks_held, check_same, events, matched


def payload(*batch: KVEvent) -> bytes:
    return encode_kv_events(KVEvents(0.0, list(batch), 0))


def as_arrays(*batch: KVEvent) -> bytes:
    """The encoding before vLLM 0.24."""
    fields = {"BlockStored": 9, "BlockRemoved": 3, "AllBlocksCleared": 0}
    raw = []
    for event in batch:
        name = type(event).__name__
        raw.append([name, *(getattr(event, field) for field in event.__struct_fields__[: fields[name]])])
    return msgspec.msgpack.encode([0.0, raw, 0])


def store(name: int, tokens: list[int], parent: int | None = None) -> bytes:
    return payload(
        BlockStored(block_hashes=[name], token_ids=tokens, parent_block_hash=parent, block_size=SIZE, medium="GPU")
    )


def remove(name: int) -> bytes:
    return payload(BlockRemoved(block_hashes=[name], medium="GPU"))


def follower(replay: Replay | None = None) -> Follower:
    return Follower(KVDirectory(2, block_size=SIZE, rng=np.random.default_rng(0)), replay)


MESSAGES = [store(10, [1, 2]), store(11, [3, 4], 10), remove(11), store(12, [5, 6], 10)]


def frames(start: int = 0, stop: int = len(MESSAGES)) -> Iterator[Frame]:
    for seq in range(start, stop):
        yield Frame(b"kv", seq, MESSAGES[seq])
    yield Frame(b"kv", REPLAY_END, b"")


def held(stream: Follower) -> list[int]:
    return [name for name in (10, 11, 12) if matched(stream.directory, [name])[0]]


def test_in_order() -> None:
    stream = follower()
    for seq, message in enumerate(MESSAGES):
        assert not stream.missing(0, seq)
        stream.apply_payload(0, seq, message)
    assert held(stream) == [10, 12]
    assert stream.directory.counters.gaps == stream.directory.counters.forgotten == 0


def test_gap_is_replayed() -> None:
    asked = []

    def replay(worker: int, start: int) -> Iterator[Frame]:
        asked.append((worker, start))
        return frames(start)

    stream = follower(replay)
    stream.apply_payload(0, 0, MESSAGES[0])
    stream.apply_payload(0, 3, MESSAGES[3])
    counters = stream.directory.counters
    assert asked == [(0, 1)]
    assert held(stream) == [10, 12]
    assert (counters.gaps, counters.replayed, counters.lost, counters.forgotten) == (1, 2, 0, 0)


def test_fetched_frames_may_be_handed_in() -> None:
    stream = follower()
    stream.apply_payload(0, 0, MESSAGES[0])
    assert stream.missing(0, 3) == range(1, 3)
    stream.apply_payload(0, 3, MESSAGES[3], replayed=frames(1))
    assert held(stream) == [10, 12]


@pytest.mark.parametrize("error", [UnavailableError("no replay endpoint"), TimeoutError()])
def test_gap_that_cannot_be_replayed_forgets(error: type[Exception]) -> None:
    def broken(*_: int) -> Iterator[Frame]:
        raise error

    for replay in (None, broken, lambda *_: iter([Frame(b"", 1, MESSAGES[1])])):
        stream = follower(replay)
        stream.apply_payload(0, 0, MESSAGES[0])
        stream.apply_payload(1, 0, MESSAGES[0])
        stream.apply_payload(0, 3, MESSAGES[3])
        counters = stream.directory.counters
        assert held(stream) == [12], "only what was told after the gap"
        assert stream.directory.match_tokens([1, 2, 5, 6]).tolist() == [0, 2], "the other worker keeps its own"
        assert (counters.gaps, counters.replayed, counters.lost, counters.forgotten) == (1, 0, 2, 1)
        assert counters.unknown_parents == 1
        stream.apply_payload(0, 4, MESSAGES[0])
        assert stream.directory.match_tokens([1, 2, 5, 6]).tolist() == [4, 2], "told again, and its child joins"


def test_partial_replay_starts_from_what_is_there() -> None:
    stream = follower(lambda *_: frames(2))
    stream.apply_payload(0, 0, MESSAGES[0])
    stream.apply_payload(0, 3, MESSAGES[3])
    counters = stream.directory.counters
    assert held(stream) == [12]
    assert (counters.replayed, counters.lost, counters.unknown_removals) == (1, 1, 1)


def test_fault_in_the_callback_forgets_and_is_raised() -> None:
    def faulty(*_: int) -> Iterator[Frame]:
        raise KeyError("a bug")

    stream = follower(faulty)
    stream.apply_payload(0, 0, MESSAGES[0])
    with pytest.raises(KeyError):
        stream.apply_payload(0, 2, MESSAGES[2])
    assert held(stream) == []


def test_first_message_replays_the_past() -> None:
    stream = follower(lambda _, start: frames(start))
    stream.apply_payload(0, 3, MESSAGES[3])
    assert held(stream) == [10, 12]
    assert stream.directory.counters.gaps == 0
    late = follower()
    late.apply_payload(0, 1_000_000, MESSAGES[0])
    assert held(late) == [10]


def test_restart_forgets() -> None:
    stream = follower()
    for seq, message in enumerate(MESSAGES):
        stream.apply_payload(0, seq, message)
    stream.apply_payload(0, 0, store(11, [3, 4], 10))
    counters = stream.directory.counters
    assert held(stream) == [11]
    assert stream.directory.match_tokens([1, 2, 3, 4])[0] == 0
    assert (counters.restarts, counters.gaps, counters.forgotten) == (1, 0, 2)
    stream.drop_worker(0)
    assert held(stream) == []
    assert not stream.missing(0, 0)


@pytest.mark.parametrize("forged", [2**64 - 2, 2**63, 5_000_000])
def test_one_forged_number_does_not_silence_a_worker(forged: int) -> None:
    stream = follower(lambda _, start: frames(start, 2))
    stream.apply_payload(0, 0, MESSAGES[0])
    stream.apply_payload(0, 1, MESSAGES[1])
    stream.apply_payload(0, forged, payload())
    assert held(stream) == [], "it may have been a restart"
    assert stream.missing(0, 2) == range(2), "what is true is asked for again"
    stream.apply_payload(0, 2, MESSAGES[2])
    stream.apply_payload(0, 3, MESSAGES[3])
    counters = stream.directory.counters
    assert held(stream) == [10, 12]
    assert (counters.restarts, counters.lost) == (2, 0), "and the counter of lost messages is not spoiled"


@given(st.lists(st.integers(0, 2**64 - 2), max_size=8))
def test_honest_messages_count_whatever_numbers_came_before(forged: list[int]) -> None:
    stream = follower()
    for seq in forged:
        stream.apply_payload(0, seq, payload())
    for seq, message in enumerate(MESSAGES):
        stream.apply_payload(0, seq, message)
    assert held(stream) == [10, 12]


def test_more_than_a_model_needs_is_refused_before_it_is_decoded() -> None:
    stream = follower()
    stream.apply_payload(0, 0, MESSAGES[0])
    many = BlockStored(block_hashes=[1] * (MAX_BLOCKS + 1), block_size=SIZE)
    stream.apply_payload(0, 1, payload(many))
    assert held(stream) == []
    assert stream.directory.counters.undecodable == 1
    assert str(MAX_BLOCKS) in stream.directory.counters.last_error


@pytest.mark.parametrize("damage", [b"", b"\xc1", msgspec.msgpack.encode([0.0, [{"type": "BlockMoved"}], 0])])
def test_unreadable_message_forgets(damage: Any) -> None:
    stream = follower()
    stream.apply_payload(0, 0, MESSAGES[0])
    stream.apply_payload(0, 1, damage)
    assert held(stream) == []
    assert stream.directory.counters.undecodable == stream.directory.counters.forgotten == 1
    stream.apply_payload(0, 2, MESSAGES[0])
    assert held(stream) == [10]
    assert stream.directory.counters.gaps == 0


def test_wrong_arguments() -> None:
    with pytest.raises(InputError, match="worker=2 must be"):
        follower().apply_payload(2, 0, MESSAGES[0])
    for seq in (-1, REPLAY_END):
        with pytest.raises(InputError, match=f"seq={seq} must be"):
            follower().apply_payload(0, seq, MESSAGES[0])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_lossy_stream_never_promises_a_block_that_is_gone(data: st.DataObject) -> None:
    """Two workers in either encoding; messages get lost, some can be replayed, workers restart."""
    stream = follower(lambda worker, start: log[worker][start:] if served[worker] else [])
    truth, healed = ReferenceDirectory(2, SIZE), [True, True]
    log: list[list[Frame]] = [[], []]
    served = data.draw(st.tuples(st.booleans(), st.booleans()))
    encode = [payload, data.draw(st.sampled_from([payload, as_arrays]))]
    named = []
    for _ in range(data.draw(st.integers(0, 25))):
        worker, fate = data.draw(st.integers(0, 1)), data.draw(st.sampled_from(["seen"] * 5 + ["lost"] * 3 + ["anew"]))
        if fate == "anew":
            truth.drop(worker)
            log[worker].clear()
            healed[worker] = True
        event = data.draw(events())
        if encode[worker] is as_arrays:
            event = decode_kv_events(as_arrays(event)).events[0]  # less the fields that this form never had
        truth.apply(worker, event)
        named += [event.block_hashes] if isinstance(event, BlockStored) else []
        message = encode[worker](event)
        log[worker].append(Frame(b"", len(log[worker]), message))
        if fate == "lost":
            healed[worker] = healed[worker] and served[worker]
        else:
            stream.apply_payload(worker, len(log[worker]) - 1, message)
    for worker in range(2):  # a last message that says nothing, so that a gap or restart is seen
        log[worker].append(Frame(b"", len(log[worker]), payload()))
        stream.apply_payload(worker, len(log[worker]) - 1, payload())
    if not all(healed):
        for chain in named:
            assert (matched(stream.directory, chain) <= truth.match(chain)).all()
        return
    check_same(stream.directory, truth, named)


class Engine:
    """A prefix cache of its own hash function that reports, truthfully, what it does."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.blocks: set[tuple[int, ...]] = set()
        """The prefix that each cached block ends."""

    def name(self, prefix: tuple[int, ...]) -> bytes:
        return hashlib.sha256(repr((self.seed, prefix)).encode()).digest()

    def serve(self, prompt: list[int]) -> list[KVEvent]:
        """Stores the missing blocks, and tells of a few that it has, as vLLM does."""
        told: list[KVEvent] = []
        for end in range(SIZE, len(prompt) + 1, SIZE):
            prefix = tuple(prompt[:end])
            if prefix in self.blocks and sum(prefix) % 2:
                continue
            parent = self.name(prefix[:-SIZE]) if end > SIZE else None
            self.blocks.add(prefix)
            told.append(
                BlockStored(
                    block_hashes=[self.name(prefix)],
                    parent_block_hash=parent,
                    token_ids=list(prefix[-SIZE:]),
                    block_size=SIZE,
                    medium="GPU",
                    group_idx=0,
                )
            )
        return told

    def evict(self, number: int) -> list[KVEvent]:
        if not self.blocks:
            return []
        prefix = sorted(self.blocks)[number % len(self.blocks)]
        self.blocks.discard(prefix)
        return [BlockRemoved(block_hashes=[self.name(prefix)], medium="GPU", group_idx=0)]

    def hit(self, prompt: list[int]) -> int:
        ends = range(SIZE, len(prompt) + 1, SIZE)
        return next((end - SIZE for end in ends if tuple(prompt[:end]) not in self.blocks), len(prompt))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_truthful_engines_on_a_lossy_wire(data: st.DataObject) -> None:
    """Exact as long as losses can be replayed; after one that cannot, never a token too many."""
    engines = [Engine(0), Engine(1)]
    log: list[list[Any]] = [[], []]
    replayable = data.draw(st.booleans())
    stream = follower(lambda worker, start: log[worker][start:] if replayable else [])
    lossy = False
    for _ in range(data.draw(st.integers(1, 30))):
        worker = data.draw(st.integers(0, 1))
        what = data.draw(st.sampled_from(["serve"] * 6 + ["evict"] * 4 + ["restart"]))
        number = data.draw(st.integers(0, 63))
        if what == "restart":
            engines[worker] = Engine(number)
            log[worker].clear()
            told: list[KVEvent] = []
        else:
            told = engines[worker].serve(PROMPTS[number]) if what == "serve" else engines[worker].evict(number)
        message = data.draw(st.sampled_from([payload, as_arrays]))(*told)
        log[worker].append(Frame(b"", len(log[worker]), message))
        if what != "restart" and data.draw(st.integers(0, 3)) == 0:
            lossy = True
        else:
            stream.apply_payload(worker, len(log[worker]) - 1, message)
    for worker in range(2):
        stream.apply_payload(worker, len(log[worker]), payload())
    for prompt in PROMPTS:
        got, right = stream.directory.match_tokens(prompt), [engine.hit(prompt) for engine in engines]
        assert (got <= right).all()
        if replayable or not lossy:
            assert got.tolist() == right
    check_directory(stream.directory)


MAPS = payload(BlockStored(block_hashes=[1, 2], token_ids=[1, 0, 1, 1], block_size=SIZE, extra_keys=[["a"], None]))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_fuzzed_bytes_are_counted_and_raise_nothing(data: st.DataObject) -> None:
    stream, sound = follower(), [MAPS, MESSAGES[1], MESSAGES[2], as_arrays(*decode_kv_events(MAPS).events)]
    stream.apply_payload(0, 0, MESSAGES[0])
    for seq in range(1, 4):
        raw = bytearray(data.draw(st.sampled_from(sound)))
        for _ in range(data.draw(st.integers(0, 4))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        before = stream.directory.counters.undecodable
        stream.apply_payload(0, seq, bytes(raw))
        if stream.directory.counters.undecodable > before:
            assert blocks_held(stream.directory, 0) == (0, 0)
    check_directory(stream.directory)
    for prompt in PROMPTS[:4]:
        stream.directory.match_tokens(prompt)


@given(st.binary(max_size=60))
def test_any_bytes(raw: bytes) -> None:
    stream = follower()
    stream.apply_payload(0, 0, raw)
    assert stream.directory.counters.undecodable <= 1


@settings(deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-9, 9)
        | st.text(max_size=2)
        | st.binary(max_size=2)
        | st.floats(allow_nan=False),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=6,
    )
)
def test_any_extra_keys(keys: Any) -> None:
    stream = follower()
    stream.apply_payload(0, 0, payload(BlockStored(block_hashes=[7], token_ids=[1, 2], block_size=2, extra_keys=keys)))
    plain = keys is None or keys in ([], [None], [[]])
    if not (isinstance(keys, list) and len(keys) != 1):
        assert stream.directory.match_tokens([1, 2])[0] == (2 if plain else 0)
    assert matched(stream.directory, [7])[0] == 1


def test_a_follower_that_joins_late_learns_what_a_worker_stored() -> None:
    """Events of a worker's blocks, salted ones too, asked again of its replay endpoint."""
    secret = "a secret that a fleet shares"
    stream = EventStream("tcp://127.0.0.1:*", b"kv", 100, secret, "tcp://127.0.0.1:*")
    table, tokens = BlockTable(8, SIZE), [1, 2, 3, 4]
    try:
        for salt in (None, "tenant"):
            digests = block_digests(tokens, SIZE, salt=salt)
            blocks = table.take(2)
            for full in (1, 2):
                table.store(blocks[:full], digests[:full], tokens, full - 1, salt)
                stream.publish(payload(*table.take_events()))
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            secure_subscriber(dealer, secret)
            dealer.connect(stream._replay.endpoint if stream._replay else "")

            def replay(_: int, first: int) -> Iterator[Frame]:
                dealer.send_multipart([b"", first.to_bytes(8, "big")])
                while True:
                    frame = from_frames(dealer.recv_multipart()[1:])
                    yield frame
                    if frame.seq == REPLAY_END:
                        return

            late = follower(replay)
            late.apply_payload(0, 4, payload())
        assert late.directory.counters.replayed == 4
        for salt, cached in ((None, 4), ("tenant", 4), ("other", 0)):
            assert late.directory.match_tokens(tokens, cache_salt=salt)[0] == cached
    finally:
        stream.close()
