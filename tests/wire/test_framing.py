"""Frames of an event stream: there and back, both replay forms, and a count of what was lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import InputError
from coterie.wire.framing import REPLAY_END, Frame, Gaps, from_frames, to_frames


@given(st.binary(max_size=20), st.integers(0, REPLAY_END), st.binary(max_size=20))
def test_round_trip(topic: bytes, seq: int, payload: bytes) -> None:
    frames = to_frames(topic, seq, payload)
    assert from_frames(frames) == Frame(topic, seq, payload)
    assert from_frames(frames[1:]) == Frame(b"", seq, payload), "a replay without the topic"


def test_the_sequence_is_eight_bytes_most_significant_first() -> None:
    assert to_frames(b"kv", 258, b"x") == [b"kv", bytes.fromhex("0000000000000102"), b"x"]


def test_the_end_of_a_replay_is_minus_one() -> None:
    assert from_frames([b"", (-1).to_bytes(8, "big", signed=True), b""]).seq == REPLAY_END


@given(st.lists(st.binary(max_size=10), max_size=6))
def test_any_frames_decode_or_are_refused(frames: list[bytes]) -> None:
    sound = (len(frames) == 3 and len(frames[1]) == 8) or (len(frames) == 2 and len(frames[0]) == 8)
    if sound:
        assert from_frames(frames).payload == frames[-1]
        return
    with pytest.raises(InputError, match="8-byte sequence") as caught:
        from_frames(frames)
    assert "\n" not in str(caught.value)


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_gaps_count_exactly_what_was_dropped(kept: list[bool]) -> None:
    """Between the first message that arrived and the last: before it nobody was listening, after it nobody knows."""
    gaps, arrived = Gaps(), [seq for seq, here in enumerate(kept) if here]
    missed = [gaps.see(seq) for seq in arrived]
    expected = arrived[-1] - arrived[0] + 1 - len(arrived) if arrived else 0
    assert (gaps.lost, sum(missed)) == (expected, expected)


def test_a_publisher_that_starts_anew_counts_from_zero() -> None:
    gaps = Gaps()
    assert [gaps.see(seq) for seq in (10, 11, 0, 1)] == [0, 0, 0, 0]
    assert gaps.lost == 0
    assert gaps.see(0) == 0
    assert gaps.see(2) == 1
    fresh = Gaps()
    fresh.see(100)
    assert fresh.see(3) == 3, "its first three messages are gone"
    assert fresh.lost == 3


def test_frames_of_another_buffer_type() -> None:
    """Sockets hand out memory views too."""
    seq = np.array([7], ">u8").tobytes()
    assert from_frames([memoryview(b"kv"), memoryview(seq), memoryview(b"x")]).seq == 7  # type: ignore[list-item]
