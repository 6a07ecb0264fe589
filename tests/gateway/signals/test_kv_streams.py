"""Streams on real sockets: what is lost is replayed or forgotten, and nothing that a worker sends raises."""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from books import check_directory
from coterie.errors import ConfigError
from coterie.gateway.signals.kv_streams import BURST_S, SHARE, KvStreams, _Stream, compile_directory
from coterie.kvindex import _tables, directory, follower
from coterie.wire.framing import QUEUE_BYTES, to_frames
from coterie.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, decode_kv_events
from kv_publisher import Publisher, payload
from kv_reference import PROMPTS, SIZE, ReferenceDirectory, check_same, events, matched

PROMPT = np.arange(8)
LOOPS = sorted(set(re.findall(r"_tables\.([a-z]\w+)\(", inspect.getsource(directory))))
"""Compiled loops that the directory calls."""
HUGE = bytes(31 << 20)


def stored(name: int, tokens: list[int], parent: int | None = None, **more: Any) -> bytes:
    more = {"block_size": SIZE, "medium": "GPU", **more}
    return payload(BlockStored(block_hashes=[name], token_ids=tokens, parent_block_hash=parent, **more))


CHAIN = [stored(10, [0, 1]), stored(11, [2, 3], 10), stored(12, [4, 5], 11)]


@pytest.mark.parametrize("loop", LOOPS)
def test_warming_up_runs_every_loop_of_the_directory(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    compiled = getattr(_tables, loop)

    def counting(*arguments: Any) -> Any:
        called.append(loop)
        return compiled(*arguments)

    monkeypatch.setattr(_tables, loop, counting)
    compile_directory()
    assert called


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def following(*publishers: Publisher, secure: Any = None, **settings_: Any) -> AsyncIterator[KvStreams]:
    streams = KvStreams(block_size=SIZE, **settings_)
    try:
        for row, publisher in enumerate(publishers):
            streams.join(f"w{row}", row, publisher.endpoint, publisher.replay, secure)
            await asyncio.to_thread(publisher.wait_for_subscriber)
            await until(lambda row=row: streams.connected(f"w{row}"))  # type: ignore[misc]
            if publisher.replay is not None:  # what is told from here on is not in the first replay
                await until(lambda publisher=publisher: publisher.asked)  # type: ignore[misc]
        yield streams
    finally:
        await streams.close()


async def told(streams: KvStreams, publisher: Publisher, row: int = 0, *others: Publisher) -> None:
    """All that was sent was applied, by all others too: a message shows what was lost, and one that it was applied."""
    publisher.publish(payload())
    publisher.publish(payload())
    sent = sum(one.sent for one in (publisher, *others))
    await until(lambda: streams.counters["messages"] == sent and streams._follower._next[row] == len(publisher.log))


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


@pytest.fixture
def publisher() -> Any:
    made = Publisher()
    yield made
    made.close()


def test_follows(publisher: Publisher) -> None:
    async def test() -> None:
        async with following(publisher) as streams:
            assert streams.cached(PROMPT, 2).tolist() == [0, 0]
            for message in CHAIN:
                publisher.publish(message)
            await told(streams, publisher)
            assert streams.cached(PROMPT, 2).tolist() == [6, 0]
            assert streams.cached(PROMPT[:6], 1).tolist() == [4], "an engine computes at least one token"
            assert streams.cached(PROMPT, 1, cache_salt="tenant").tolist() == [0]
            publisher.publish(payload(BlockRemoved(block_hashes=[11], medium="GPU")))
            await told(streams, publisher)
            assert streams.cached(PROMPT, 1).tolist() == [2]

    run(test())


def test_a_late_gateway_learns_what_was_told_before(publisher: Publisher) -> None:
    async def test() -> None:
        for message in CHAIN:
            publisher.publish(message)
        async with following(publisher) as streams:
            await until(lambda: streams.cached(PROMPT, 1).tolist() == [6])  # before any new message
            publisher.sent = 0  # to nobody
            await told(streams, publisher)
            assert streams.directory.counters.gaps == streams.directory.counters.restarts == 0

    run(test())


def test_a_gap_is_replayed_or_forgotten() -> None:
    async def test(publisher: Publisher) -> None:
        async with following(publisher) as streams:
            publisher.publish(CHAIN[0])
            publisher.publish(CHAIN[1], lost=True)
            publisher.publish(CHAIN[2])
            await told(streams, publisher)
            assert streams.directory.counters.gaps == 1
            if publisher.replay:
                assert streams.cached(PROMPT, 1).tolist() == [6]
                assert publisher.asked == [0, 1]
            else:
                assert streams.cached(PROMPT, 1).tolist() == [0]

    for replays in (True, False):
        made = Publisher(replays=replays)
        run(test(made))
        made.close()


def test_a_restart_drops_the_blocks(publisher: Publisher) -> None:
    async def test() -> None:
        async with following(publisher) as streams:
            for message in CHAIN:
                publisher.publish(message)
            await told(streams, publisher)
            publisher.begin_anew()
            publisher.publish(CHAIN[0])
            await told(streams, publisher)
            assert streams.directory.counters.restarts == 1
            assert streams.cached(PROMPT, 1).tolist() == [2]

    run(test())


def test_a_connection_that_ends_drops_the_blocks_and_is_made_anew() -> None:
    async def test() -> None:
        first = Publisher(replays=False)
        async with following(first) as streams:
            for message in CHAIN:
                first.publish(message)
            await told(streams, first)
            await asyncio.to_thread(first.close)
            await until(lambda: not streams.cached(PROMPT, 1).any())
            # The new engine has told of more than the old one had: numbers alone would not show the restart.
            second = Publisher(first.endpoint, replays=False)
            await asyncio.to_thread(second.wait_for_subscriber)
            for _ in range(9):
                second.publish(payload(), lost=True)
            second.publish(CHAIN[0])
            await told(streams, second, 0, first)
            assert streams.cached(PROMPT, 1).tolist() == [2]
            assert streams.counters["disconnections"] == 1
            second.close()

    run(test())


def test_workers_join_and_leave_and_rows_grow(publisher: Publisher) -> None:
    async def test() -> None:
        async with following(publisher) as streams:
            for message in CHAIN:
                publisher.publish(message)
            await told(streams, publisher)
            others = [Publisher(), Publisher()]
            for row, other in zip((63, 200), others, strict=True):
                streams.join(f"w{row}", row, other.endpoint, other.replay)
                await asyncio.to_thread(other.wait_for_subscriber)
                other.publish(CHAIN[0])
                await told(streams, other, row, publisher, *others[: row == 200])
            found = streams.cached(PROMPT, 201)
            assert {row: tokens for row, tokens in enumerate(found.tolist()) if tokens} == {0: 6, 63: 2, 200: 2}
            streams.leave("w63")
            streams.leave("w63")
            assert streams.cached(PROMPT, 201)[63] == 0
            streams.restarted("w0")
            assert streams.cached(PROMPT, 1).tolist() == [0]
            with pytest.raises(ConfigError, match="has row 200 already"):
                streams.join("another", 200, publisher.endpoint)
            with pytest.raises(ConfigError, match="must begin with tcp"):
                streams.join("wrong", 3, "http://host:5557")
            check_directory(streams.directory)
        for other in others:
            other.close()

    run(test())


def test_too_many_blocks_are_refused(publisher: Publisher) -> None:
    async def test() -> None:
        async with following(publisher, max_blocks=2) as streams:
            for message in CHAIN:
                publisher.publish(message)
            await told(streams, publisher)
            assert streams.directory.counters.refused == 1
            assert "at most 2" in streams.directory.counters.last_error
            assert streams.cached(PROMPT, 1).tolist() == [4]
            other = Publisher()
            streams.join("w1", 1, other.endpoint, other.replay, kv_blocks=1)
            await asyncio.to_thread(other.wait_for_subscriber)
            for message in CHAIN:
                other.publish(message)
            await told(streams, other, 1, publisher)
            assert streams.cached(PROMPT, 2).tolist() == [4, 2], "its KV cache is known"
        other.close()

    run(test())


def test_messages_longer_than_the_model_needs_are_not_read(publisher: Publisher) -> None:
    async def test() -> None:
        async with following(publisher) as streams:
            publisher.send(to_frames(b"kv", 0, HUGE))
            publisher.sent = 0  # to nobody
            await until(lambda: streams.counters["disconnections"] == 1)
            assert streams.counters["messages"] == 0
            assert "w0" in streams.last_error
            assert str(2 << 20) in streams.last_error
            await asyncio.to_thread(publisher.wait_for_subscriber)  # of which the first message is the end of the old
            await asyncio.to_thread(publisher.wait_for_subscriber)
            await until(lambda: len(publisher.asked) == 2)
            for message in CHAIN:
                publisher.publish(message)
            await told(streams, publisher)
            assert streams.cached(PROMPT, 1).tolist() == [6], "the worker is followed again"

    run(test())


@pytest.mark.parametrize(
    ("context", "most"), [(0, 1 << 20), (1 << 18, 2 << 20), (1 << 20, 8 << 20), (1 << 31, 8 << 20)]
)
def test_messages_are_bounded_by_the_context_and_queues_in_bytes(context: int, most: int) -> None:
    async def test() -> None:
        streams = KvStreams()
        streams.context_tokens = context
        socket = streams._socket(zmq.SUB, _Stream("w0", 0, "tcp://127.0.0.1:1", None, None))
        assert socket.getsockopt(zmq.MAXMSGSIZE) == most
        assert most * int(socket.getsockopt(zmq.RCVHWM)) <= QUEUE_BYTES
        socket.close()
        await streams.close()

    run(test())


def test_messages_are_decoded_off_the_event_loop(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()

    def decode(data: bytes) -> Any:
        threads.add(threading.get_ident())
        return decode_kv_events(data)

    monkeypatch.setattr(follower, "decode_kv_events", decode)

    async def test() -> None:
        async with following(publisher) as streams:
            publisher.publish(CHAIN[0])
            await told(streams, publisher)
        assert threads, "it was decoded"
        assert threading.get_ident() not in threads

    run(test())


def test_a_worker_gets_a_share_of_the_thread() -> None:
    stream = _Stream("w0", 0, "tcp://127.0.0.1:1", None, None)
    assert stream.spend(BURST_S, 1.0) == 0, "it may catch up at once"
    assert stream.spend(0.1, 1.0) == pytest.approx(0.1 / SHARE), "then it waits"
    assert stream.spend(0.1, 1.0 + 0.2 / SHARE) == 0
    stream.spend(0.0, 1e6)
    assert stream.credit_s == BURST_S


@pytest.mark.parametrize("forged", [2**64 - 2, 1_000_000])
def test_a_forged_number_in_a_replay_does_not_silence_the_worker(publisher: Publisher, forged: int) -> None:
    async def test() -> None:
        publisher.publish(CHAIN[0])
        publisher.forged = forged
        async with following(publisher) as streams:
            await until(lambda: streams._follower._next[0] == forged + 1)
            publisher.sent = 0  # to nobody
            for message in CHAIN[1:]:
                publisher.publish(message)
            await told(streams, publisher)
            assert streams.cached(PROMPT, 1).tolist() == [6]

    run(test())


def test_a_forged_number_does_not_silence_the_worker(publisher: Publisher) -> None:
    async def test() -> None:
        async with following(publisher) as streams:
            publisher.publish(CHAIN[0])
            publisher.send(to_frames(b"kv", 2**64 - 2, CHAIN[0]))
            for message in CHAIN[1:]:
                publisher.publish(message)
            await told(streams, publisher)
            assert streams.cached(PROMPT, 1).tolist() == [6]
            assert streams.directory.counters.lost == 0

    run(test())


def test_a_replay_endpoint_that_is_silent_holds_up_its_own_worker_only(publisher: Publisher) -> None:
    async def test() -> None:
        silent = zmq.Context()
        socket = silent.socket(zmq.ROUTER)
        socket.bind("tcp://127.0.0.1:*")
        streams = KvStreams(block_size=SIZE, replay_s=0.05)
        streams.join("w0", 0, publisher.endpoint, socket.getsockopt_string(zmq.LAST_ENDPOINT))
        await asyncio.to_thread(publisher.wait_for_subscriber)
        for message in CHAIN:
            publisher.publish(message)
        await told(streams, publisher)
        assert streams.counters["unanswered"] == 1, "asked once, then left alone for a while"
        assert streams.cached(PROMPT, 1).tolist() == [6]
        await streams.close()
        silent.destroy(linger=0)

    run(test())


def test_keys_are_set_before_connecting() -> None:
    """A subscriber with the right keys is heard; one without them gets nothing, and it is counted."""
    server_public, server_secret = zmq.curve_keypair()

    def serve(socket: zmq.Socket[bytes]) -> None:
        socket.curve_secretkey, socket.curve_publickey, socket.curve_server = server_secret, server_public, True

    def secure(socket: Any) -> None:
        socket.curve_serverkey = server_public
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()

    async def test() -> None:
        publisher = Publisher(secure=serve)
        async with following(publisher, secure=secure) as streams:
            publisher.publish(CHAIN[0])
            await told(streams, publisher)
            assert streams.cached(PROMPT, 1).tolist() == [2]
            plain = KvStreams(block_size=SIZE)
            plain.join("w0", 0, publisher.endpoint)
            await until(lambda: plain.counters["refused"] > 0)
            assert not plain.connected("w0")
            await plain.close()
        publisher.close()

    run(test())


@settings(max_examples=12)
@given(st.data())
def test_lossy_streams_against_the_reference(data: st.DataObject) -> None:
    """Two workers; messages are lost, repeated and out of order, garbage comes between, workers begin anew."""

    async def test() -> None:
        replays = data.draw(st.booleans())
        publishers = [Publisher(replays=replays) for _ in range(2)]
        truth, healed, named = ReferenceDirectory(2, SIZE), [True, True], []
        async with following(*publishers) as streams:
            for _ in range(data.draw(st.integers(0, 20))):
                worker = data.draw(st.integers(0, 1))
                publisher = publishers[worker]
                fate = data.draw(st.sampled_from(["told"] * 6 + ["lost"] * 3 + ["anew", "again", "garbage"]))
                if fate == "anew":
                    await told(streams, publisher, worker, publishers[1 - worker])
                    truth.drop(worker)
                    publisher.begin_anew()
                    healed[worker] = True
                elif fate == "again" and publisher.log:
                    seq = data.draw(st.integers(0, len(publisher.log) - 1))
                    publisher.send(to_frames(b"kv", seq, publisher.log[seq]))
                    healed[worker] = False if not replays else healed[worker]
                elif fate == "garbage":
                    publisher.send(data.draw(st.lists(st.binary(max_size=9), min_size=1, max_size=5)))
                    if not replays:
                        healed[worker] = False
                event = data.draw(events())
                truth.apply(worker, event)
                named += [event.block_hashes] if isinstance(event, BlockStored) else []
                publisher.publish(payload(event), lost=fate == "lost")
                healed[worker] = healed[worker] and (fate != "lost" or replays)
            for worker, publisher in enumerate(publishers):
                await told(streams, publisher, worker, publishers[1 - worker])
            if all(healed):
                check_same(streams.directory, truth, named)
            for chain in named:
                assert (matched(streams.directory, chain) <= truth.match(chain)).all()
            for prompt in PROMPTS[::7]:
                assert (streams.cached(np.array(prompt), 2) <= truth.match_tokens(prompt)).all()
            assert streams.counters["failed"] == 0
        for publisher in publishers:
            publisher.close()

    run(test())


@settings(max_examples=5)
@given(st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=4), max_size=60), st.data())
def test_fuzzed_messages_raise_nothing(rubbish: list[list[bytes]], data: st.DataObject) -> None:
    async def test() -> None:
        publisher = Publisher()
        async with following(publisher) as streams:
            for frames in rubbish:
                publisher.send(frames)
            for seq in range(20):
                raw = bytearray(data.draw(st.sampled_from([*CHAIN, payload(AllBlocksCleared())])))
                raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
                publisher.send(to_frames(b"kv", data.draw(st.sampled_from([seq, 2**63, 2**64 - 2])), bytes(raw)))
            publisher.begin_anew()
            for message in CHAIN:
                publisher.publish(message)
            await told(streams, publisher)
            assert streams.counters["failed"] == 0
            assert streams.cached(PROMPT, 1)[0] == 6
        publisher.close()

    run(test())
