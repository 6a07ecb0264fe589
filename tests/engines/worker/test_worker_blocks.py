"""The block table against a model of it: a set of held prefixes and an order of release."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from books import check_blocks
from coterie.engines.worker.blocks import BlockTable, OutOfBlocksError, block_digests, wire_hash
from coterie.errors import ConfigError
from coterie.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, decode_kv_events, encode_kv_events
from coterie.wire.kv_events import KVEvents as Batch

SIZE = 2


def test_a_hash_covers_all_before_it() -> None:
    one, other = block_digests([1, 2, 3, 4, 5], SIZE), block_digests([9, 2, 3, 4], SIZE)
    assert len(one) == 2, "full blocks alone"
    assert set(one).isdisjoint(other), "the same second block after another first is another prefix"
    assert block_digests([1, 2, 3, 4, 5, 6], SIZE, one)[:2] == one
    assert block_digests([1, 2, 3, 4], SIZE) == one
    assert block_digests([1], SIZE) == []
    assert 0 <= wire_hash(one[0]) < 1 << 64


def test_the_end_of_a_prefix_goes_before_its_beginning() -> None:
    table = BlockTable(3, SIZE)
    tokens = [1, 2, 3, 4, 5, 6]
    digests = block_digests(tokens, SIZE)
    blocks = table.take(3)
    table.store(blocks, digests, tokens, 0)
    table.release(blocks)
    assert table.find(digests) == blocks
    table.take(1)
    assert table.find(digests) == blocks[:2]
    stored, removed = table.take_events()
    assert isinstance(stored, BlockStored)
    assert (stored.parent_block_hash, stored.token_ids) == (None, tokens)
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == [wire_hash(digests[2])]
    assert table.take_events() == []


def test_all_or_none() -> None:
    table = BlockTable(4, SIZE)
    table.take(3)
    with pytest.raises(OutOfBlocksError, match="2 KV blocks are wanted; 1 of 4"):
        table.take(2)
    assert table.available == 1
    check_blocks(table)


def test_a_prefix_is_stored_once() -> None:
    table = BlockTable(8, SIZE)
    tokens = [1, 2, 3, 4, 5, 6]
    digests = block_digests(tokens, SIZE)
    one, two = table.take(2), table.take(3)
    table.store(one, digests[:2], tokens, 0)
    table.store(two, digests, tokens, 0)  # computed at the same time; only its third block is new
    assert table.find(digests) == [*one, two[2]]
    second = table.take_events()[1]
    assert isinstance(second, BlockStored)
    assert second.parent_block_hash == wire_hash(digests[1])
    assert second.token_ids == [5, 6]
    table.release(two)
    assert table.cached == 1, "its copies are nobody's"
    check_blocks(table)


def test_clear() -> None:
    table = BlockTable(4, SIZE)
    blocks = table.take(1)
    table.store(blocks, block_digests([1, 2], SIZE), [1, 2], 0)
    with pytest.raises(ConfigError, match="1 of 4 KV blocks are in use"):
        table.clear()
    table.release(blocks)
    table.clear()
    assert table.find(block_digests([1, 2], SIZE)) == []
    assert table.take_events()[-1] == AllBlocksCleared()
    check_blocks(table)


@settings(max_examples=80)
@given(st.data())
def test_any_sequence_keeps_its_promises(data: st.DataObject) -> None:
    """Requests come, share prefixes, end in any order: what is found was stored and not removed since."""
    table = BlockTable(data.draw(st.integers(1, 10)), SIZE)
    held: dict[int | bytes, None] = {}  # what a directory that follows the events believes
    running: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        ends: bool = data.draw(st.booleans()) if running else False
        if ends:
            table.release(running.pop(data.draw(st.integers(0, len(running) - 1))))
        else:
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=10))
            digests = block_digests(tokens, SIZE)
            found = table.find(digests)
            expected = 0
            while expected < len(digests) and wire_hash(digests[expected]) in held:
                expected += 1
            assert len(found) == expected
            table.hold(found)
            try:
                blocks = found + table.take(-(-len(tokens) // SIZE) - len(found))
            except OutOfBlocksError:
                table.release(found)
            else:
                assert len(set(blocks)) == len(blocks)
                assert all(set(blocks[len(found) :]).isdisjoint(other) for other in running), "new ones are its own"
                table.store(blocks, digests, tokens, len(found))
                running.append(blocks)
        payload = encode_kv_events(Batch(0.0, table.take_events(), 0))
        for event in decode_kv_events(payload).events:
            if isinstance(event, BlockStored):
                assert all(digest not in held for digest in event.block_hashes)
                held.update(dict.fromkeys(event.block_hashes))
            elif isinstance(event, BlockRemoved):
                for digest in event.block_hashes:
                    del held[digest]
        check_blocks(table)
        assert table.used == len({block for blocks in running for block in blocks})
        assert table.used + table.available == table.num_blocks
