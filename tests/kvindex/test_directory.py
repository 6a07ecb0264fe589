"""The KV directory: the same answers as dictionaries and sets, whatever the engines say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from books import check_directory
from coterie import kvindex
from coterie.errors import ConfigError, InputError
from coterie.kvindex import KVDirectory
from coterie.kvindex.directory import MAX_WAITING
from coterie.wire.kv_events import BlockRemoved, BlockStored
from kv_reference import SIZE, HeldBlocks, ReferenceDirectory, blocks_held, check_same, events, matched


def stored(hashes: list[Any], tokens: list[int], parent: Any = None, **fields: Any) -> BlockStored:
    fields = {"block_size": SIZE, "medium": "GPU", **fields}
    return BlockStored(block_hashes=hashes, token_ids=tokens, parent_block_hash=parent, **fields)


def removed(hashes: list[Any], **fields: Any) -> BlockRemoved:
    return BlockRemoved(block_hashes=hashes, **{"medium": "GPU", **fields})


def directory(num_workers: int = 2, **settings: Any) -> KVDirectory:
    return KVDirectory(num_workers, block_size=SIZE, rng=np.random.default_rng(0), **settings)


def test_public_names() -> None:
    assert sorted(kvindex.__all__) == ["DirectoryCounts", "Follower", "KVDirectory", "MAX_BLOCKS", "Replay"]


def test_each_workers_own_run() -> None:
    blocks = directory(3)
    blocks.stored(0, stored([10, 11, 12], [1, 2, 3, 4, 5, 6]))
    blocks.stored(1, stored([10], [1, 2]))
    blocks.stored(2, stored([11], [3, 4], parent=10))
    assert matched(blocks, [10, 11, 12, 13]).tolist() == [3, 1, 0]
    assert blocks.match_tokens([1, 2, 3, 4, 5, 6, 7]).tolist() == [6, 2, 0]
    assert blocks.match_tokens([1, 2, 3, 9]).tolist() == [2, 2, 0]
    assert blocks.match_tokens([3, 4]).tolist() == [0, 0, 0], "a later block is no first one"


@pytest.mark.parametrize("prompt", [[], [1]])
def test_prompt_shorter_than_a_block(prompt: list[Any]) -> None:
    blocks = directory()
    blocks.stored(0, stored([10], [1, 2]))
    assert blocks.match_tokens(prompt).tolist() == [0, 0]
    assert matched(blocks, []).tolist() == [0, 0]


def test_workers_that_hash_differently_share_content() -> None:
    blocks = directory()
    blocks.stored(0, stored([10, 11], [1, 2, 3, 4]))
    blocks.stored(1, stored([b"x" * 32, b"y" * 32], [1, 2, 3, 4]))
    assert blocks.match_tokens(np.array([1, 2, 3, 4], np.int32)).tolist() == [4, 4]
    assert blocks.match_tokens(np.frombuffer(np.array([1, 2, 3, 4]).tobytes(), np.int64)).tolist() == [4, 4]
    assert matched(blocks, [10, 11]).tolist() == [2, 0]
    assert matched(blocks, [b"x" * 32]).tolist() == [0, 1]


def test_one_hash_for_different_content_on_two_workers() -> None:
    blocks = directory()
    blocks.stored(0, stored([10], [1, 2]))
    blocks.stored(1, stored([10], [7, 8]))
    blocks.removed(0, removed([10]))
    assert blocks.match_tokens([7, 8]).tolist() == [0, 2]
    assert matched(blocks, [10]).tolist() == [0, 1]


def test_child_without_its_parent_is_no_hit_until_the_parent_returns() -> None:
    blocks = directory()
    blocks.stored(0, stored([10, 11], [1, 2, 3, 4]))
    blocks.removed(0, removed([10]))
    assert blocks.match_tokens([1, 2, 3, 4])[0] == matched(blocks, [10, 11])[0] == 0
    blocks.stored(0, stored([10], [1, 2]))
    assert blocks.match_tokens([1, 2, 3, 4])[0] == 4
    assert matched(blocks, [10, 11])[0] == 2


def test_unknown_parent_is_counted_and_joins_later() -> None:
    blocks = directory()
    blocks.stored(0, stored([12, 13], [5, 6, 7, 8], parent=11))
    assert blocks.counters.unknown_parents == 2
    assert blocks_held(blocks, 0) == HeldBlocks(hits=2, waiting=2)
    assert blocks.match_tokens([5, 6])[0] == 0
    blocks.stored(0, stored([11], [3, 4], parent=10))
    blocks.stored(0, stored([10], [1, 2]))
    assert blocks.match_tokens([1, 2, 3, 4, 5, 6, 7, 8])[0] == 8
    assert blocks_held(blocks, 0).waiting == 0


def test_other_media_groups_and_places_are_apart() -> None:
    blocks = directory()
    first = ([10], [1, 2])
    for fields in ({"medium": "CPU"}, {"group_idx": 1}, {"locality": "REMOTE"}, {"kv_cache_spec_kind": "mamba"}):
        blocks.stored(0, stored(*first, **fields))
    assert matched(blocks, [10])[0] == blocks.match_tokens([1, 2])[0] == 0
    assert blocks_held(blocks, 0).hits == 0
    assert blocks.counters.apart == 4
    blocks.stored(0, stored(*first, group_idx=0))
    for fields in ({"medium": "cpu"}, {"group_idx": 1}, {"locality": "REMOTE"}):
        blocks.removed(0, removed([10], **fields))
    assert blocks.match_tokens([1, 2])[0] == 2, "removed elsewhere"
    blocks.stored(0, stored(*first, medium="CPU"))
    blocks.removed(0, removed([10], group_idx=0))
    assert blocks.match_tokens([1, 2])[0] == 0, "removed here"


def test_an_engine_that_names_its_groups_corrects_the_assumption() -> None:
    blocks = directory()
    blocks.stored(0, stored([10], [1, 2], group_idx=0))
    blocks.stored(0, stored([10], [], block_size=0, medium="CPU", group_idx=0, kv_cache_spec_kind="sliding_window"))
    assert matched(blocks, [10])[0] == 0, "group 0 is no full attention"
    blocks.stored(0, stored([10], [1, 2], group_idx=1, kv_cache_spec_kind="full_attention"))
    assert blocks.match_tokens([1, 2])[0] == 2
    blocks.forget(0)
    blocks.stored(0, stored([10], [1, 2], group_idx=0))
    assert matched(blocks, [10])[0] == 0, "still known after a gap"
    assert directory(group=1).group == 1


def test_salt_lora_and_extra_keys_separate() -> None:
    blocks = directory()
    blocks.stored(0, stored([10, 11], [1, 2, 3, 4], extra_keys=[["salt"], None]))  # vLLM
    blocks.stored(1, stored([20, 21], [1, 2, 3, 4], cache_salt="salt"))  # SGLang
    assert blocks.match_tokens([1, 2, 3, 4]).tolist() == [0, 0]
    assert blocks.match_tokens([1, 2, 3, 4], cache_salt="pepper").tolist() == [0, 0]
    assert blocks.match_tokens([1, 2, 3, 4], cache_salt="salt").tolist() == [4, 4]
    assert blocks.match_tokens([1, 2, 3, 4], extra_keys=[["salt"], None]).tolist() == [4, 4]
    blocks.stored(0, stored([30, 31], [1, 2, 3, 4], lora_id=1, lora_name="ada", extra_keys=[["ada"], ["ada"]]))
    blocks.stored(1, stored([30, 31], [1, 2, 3, 4], lora_name="ada"))
    assert blocks.match_tokens([1, 2, 3, 4], lora="ada").tolist() == [4, 4]
    assert blocks.match_tokens([1, 2, 3, 4], lora="eve").tolist() == [0, 0]
    blocks.stored(0, stored([40, 41], [1, 2, 3, 4], extra_keys=[None, [["image", 3]]]))
    assert blocks.match_tokens([1, 2, 3, 4]).tolist() == [2, 0]
    assert blocks.match_tokens([1, 2, 3, 4], extra_keys=[None, [("image", 3)]]).tolist() == [4, 0]


def test_second_hash_for_one_content_is_no_hit_by_tokens() -> None:
    blocks = directory()
    blocks.stored(0, stored([10], [1, 2]))
    blocks.stored(0, stored([10], [1, 2]))
    assert blocks.counters.stored == 1
    blocks.stored(0, stored([20], [1, 2]))
    assert blocks.counters.ambiguous == 1
    assert blocks.match_tokens([1, 2])[0] == 0
    assert matched(blocks, [20])[0] == matched(blocks, [10])[0] == 1
    blocks.removed(0, removed([10]))
    blocks.stored(0, stored([10], [1, 2]))
    assert blocks.match_tokens([1, 2])[0] == 0, "still two of them"
    blocks.cleared(0)
    blocks.stored(0, stored([10], [1, 2]))
    assert blocks.match_tokens([1, 2])[0] == 2
    check_directory(blocks)


@pytest.mark.parametrize(
    "fields",
    [{"block_size": 4}, {"token_ids": [1]}, {"token_ids": [1, 2**63]}, {"extra_keys": [1, 2, 3]}, {"extra_keys": "no"}],
)
def test_blocks_of_unknown_content_are_known_by_hash_alone(fields: dict[str, Any]) -> None:
    blocks = directory()
    event = stored([10], [1, 2])
    for name, value in fields.items():
        setattr(event, name, value)
    blocks.stored(0, event)
    assert blocks.counters.without_content == 1
    assert matched(blocks, [10])[0] == 1
    assert blocks.match_tokens([1, 2])[0] == 0
    blocks.removed(0, removed([10]))
    assert blocks_held(blocks, 0).hits == matched(blocks, [10])[0] == 0


def test_unknown_removals_are_counted() -> None:
    blocks = directory()
    blocks.removed(0, removed([1, 2]))
    blocks.removed(0, removed([1], medium="CPU"))  # what is elsewhere is not kept
    assert blocks.counters.unknown_removals == 2


def test_hashes_of_every_form_stay_apart() -> None:
    numbers = [0, 1, -1, 2**64 - 1, 2**64, -(2**63)]
    forms: list[Any] = [*numbers, b"", b"\0", b"\0" * 8, b"\1" + b"\0" * 7, b"\0" * 16, b"\1"]
    blocks = directory(1)
    for count, form in enumerate(forms):
        assert matched(blocks, [form])[0] == 0, form
        blocks.stored(0, stored([form], []))
        assert blocks_held(blocks, 0).hits == count + 1
    assert matched(blocks, forms)[0] == len(forms)
    blocks.removed(0, removed(forms))
    assert blocks_held(blocks, 0).hits == 0


@pytest.mark.parametrize("num_workers", [1, 63, 64, 65, 130])
def test_many_workers(num_workers: int) -> None:
    blocks = directory(num_workers)
    tokens = list(range(2 * num_workers))
    for worker in range(num_workers):
        count = worker + 1
        blocks.stored(worker, stored(list(range(count)), tokens[: 2 * count]))
    expected = np.arange(1, num_workers + 1)
    np.testing.assert_array_equal(matched(blocks, list(range(num_workers))), expected)
    np.testing.assert_array_equal(blocks.match_tokens(tokens), 2 * expected)
    blocks.drop_worker(num_workers - 1)
    expected[-1] = 0
    np.testing.assert_array_equal(blocks.match_tokens(tokens), 2 * expected)
    check_directory(blocks)


def test_grows_and_empties() -> None:
    blocks, rng = directory(3), np.random.default_rng(1)
    hashes = rng.integers(0, 1 << 64, 5000, np.uint64).tolist()
    tokens = rng.integers(0, 1000, 10_000).tolist()
    for worker in range(3):
        blocks.stored(worker, stored(hashes, tokens))
    assert matched(blocks, hashes).tolist() == [5000] * 3
    for start in range(0, 5000, 2):
        blocks.removed(0, removed(hashes[start : start + 1]))
    check_directory(blocks)
    assert blocks_held(blocks, 0).hits == 2500
    assert blocks.match_tokens(tokens).tolist() == [0, 10_000, 10_000]
    for worker in range(3):
        blocks.cleared(worker)
    assert [blocks_held(blocks, worker).hits for worker in range(3)] == [0, 0, 0]
    check_directory(blocks)


def test_a_worker_holds_no_more_blocks_than_it_may() -> None:
    blocks = directory(2, max_blocks=3)
    blocks.limits[1] = 1
    for worker in range(2):
        blocks.stored(worker, stored([10], [1, 2]))
        blocks.stored(worker, stored([11, 12], [3, 4, 5, 6], parent=10))
        blocks.stored(worker, stored([13], [7, 8], parent=12))
    assert [blocks_held(blocks, worker).hits for worker in range(2)] == [3, 1]
    assert blocks.match_tokens([1, 2, 3, 4, 5, 6, 7, 8]).tolist() == [6, 2], "what was there stays"
    assert blocks.counters.refused == 1 + 3
    assert "worker 1" in blocks.counters.last_error
    assert "at most 1" in blocks.counters.last_error
    blocks.removed(0, removed([12]))
    blocks.stored(0, stored([13], [7, 8]))
    assert blocks_held(blocks, 0).hits == 3, "room again"
    check_directory(blocks)


def test_marks_of_ambiguous_contents_are_bounded_too() -> None:
    """Two hashes for one content leave a mark that outlives both blocks."""
    blocks = directory(1, max_blocks=4)
    for content in range(1000):
        blocks.stored(0, stored([1], [content, 0]))
        blocks.stored(0, stored([2], [content, 0]))
        blocks.removed(0, removed([1, 2]))
    assert blocks.nbytes < 20_000
    blocks.stored(0, stored([1], [-1, -1]))
    assert blocks.match_tokens([-1, -1])[0] == 2


def test_blocks_that_wait_for_a_parent_are_bounded() -> None:
    blocks = directory(1)
    names = list(range(100, 100 + MAX_WAITING))
    blocks.stored(0, stored(names, [0] * 2 * MAX_WAITING, parent=1))
    assert blocks_held(blocks, 0) == HeldBlocks(MAX_WAITING, MAX_WAITING)
    blocks.stored(0, stored([50], [1, 2], parent=2))
    assert blocks_held(blocks, 0) == HeldBlocks(MAX_WAITING + 1, MAX_WAITING), "known by its hash alone"
    assert blocks.counters.refused == 1
    blocks.stored(0, stored([1], [3, 4]))
    assert blocks_held(blocks, 0).waiting == 0
    check_directory(blocks)


def test_wrong_settings_and_arguments() -> None:
    settings: list[dict[str, Any]] = [{"num_workers": 0}, {"num_workers": 1, "block_size": 0}]
    for wrong in [*settings, {"num_workers": 1, "group": -1}]:
        with pytest.raises(ConfigError, match="must be at least"):
            KVDirectory(**wrong)
    blocks = directory(2)
    with pytest.raises(InputError, match=r"worker=2 .*num_workers=2"):
        blocks.cleared(2)
    with pytest.raises(InputError, match="expected integers"):
        blocks.match_tokens([[1, 2]])
    with pytest.raises(InputError, match="expected integers"):
        blocks.match_tokens([1.5])
    with pytest.raises(InputError, match="msgpack"):
        blocks.match_tokens([1, 2], extra_keys=[object()])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0, 1, 2, 63, 64, 65]), events()), max_size=25), st.integers(0, 2**32 - 1))
def test_same_answers_as_dictionaries_and_sets(history: list[tuple[int, Any]], seed: int) -> None:
    blocks = KVDirectory(66, block_size=SIZE, rng=np.random.default_rng(seed))
    reference = ReferenceDirectory(66, SIZE)
    for worker, event in history:
        blocks.apply(worker, event)
        reference.apply(worker, event)
    check_same(blocks, reference, [event.block_hashes for _, event in history if isinstance(event, BlockStored)])
    check_directory(blocks)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 2, 62, 63, 64, 65, 129]), st.integers(0, 2), st.booleans()), max_size=60)
)
def test_holders_come_and_go(history: list[tuple[int, int, bool]]) -> None:
    """Few holders of a block are kept in a word, many in a set of workers."""
    blocks, held = directory(130), np.zeros((130, 3), bool)
    for worker, block, holds in history:
        if holds:
            blocks.stored(worker, stored([10 + block], [block, block]))
        else:
            blocks.removed(worker, removed([10 + block]))
        held[worker, block] = holds
        check_directory(blocks)
    for block in range(3):
        np.testing.assert_array_equal(blocks.match_tokens([block, block]), SIZE * held[:, block])
    for worker in range(130):
        blocks.drop_worker(worker)
    check_directory(blocks)
    assert blocks.counters.forgotten == held.sum()


def test_more_workers_than_a_word_can_name() -> None:
    most = 32_767
    blocks = directory(most)
    for worker in (0, most - 1):
        blocks.stored(worker, stored([10], [1, 2]))
    assert np.flatnonzero(blocks.match_tokens([1, 2])).tolist() == [0, most - 1]
    with pytest.raises(ConfigError, match=f"at most {most}"):
        blocks.grow(most + 1)
