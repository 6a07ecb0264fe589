"""The worker's engine, step by step in this process: against ``generate`` and against capture from scratch."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.torch


import transformers_models as models  # noqa: E402
from coterie.engines.worker.transfer import check_prefilled, most_bytes, torch_codec  # noqa: E402
from coterie.errors import ConfigError, InputError  # noqa: E402
from coterie.footprints import footprint  # noqa: E402
from coterie.wire.footprints import footprint_of  # noqa: E402
from coterie.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored  # noqa: E402
from worker_driver import FAMILY, Driver, check_experts, prompts  # noqa: E402

CODEC = torch_codec()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save(FAMILY, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("family", models.FAMILIES)
def test_every_family_generates_what_transformers_does(family: str, tmp_path: Path) -> None:
    """Prompts of many lengths together in small chunks: greedy tokens and experts are those of each alone."""
    driver = Driver(models.save(family, tmp_path), max_step_tokens=16, max_batch=8)
    asked = prompts(6)
    keys = [driver.submit(prompt, 5 + 3 * index) for index, prompt in enumerate(asked)]
    driver.run()
    for index, (key, prompt) in enumerate(zip(keys, asked, strict=True)):
        assert driver.tokens(key) == models.generated(family, prompt, 5 + 3 * index)
        assert driver.outputs[key][-1].finish == "length"
    assert len(driver.events) == len(asked)
    check_experts(driver, family)
    assert driver.engine.blocks.used == 0


def test_tokens_do_not_depend_on_who_else_is_in_the_batch(folder: Path) -> None:
    rng = np.random.default_rng(1)
    driver = Driver(folder, max_batch=5, kv_blocks=256)
    asked = prompts(16, seed=2)
    keys = []
    for prompt in asked:  # requests come while others run
        keys.append(driver.submit(prompt, 10))
        for _ in range(rng.integers(0, 5)):
            driver.engine.step()
    driver.run()
    for key, prompt in zip(keys, asked, strict=True):
        assert driver.tokens(key) == models.generated(FAMILY, prompt, 10)
    check_experts(driver)


def test_prefix_hits_are_not_computed_again_and_keep_their_experts(folder: Path) -> None:
    driver = Driver(folder)
    prompt = prompts(1, 60, seed=5)[0] * 3
    prompt = prompt[:31]
    first = driver.submit(prompt, 6)
    driver.run()
    rows = driver.count("step_rows_total", "prefill")
    assert rows == 31
    second = driver.submit(prompt, 6)
    longer = driver.submit([*prompt, 7, 8, 9], 6)
    driver.run()
    assert driver.tokens(first) == driver.tokens(second) == models.generated(FAMILY, prompt, 6)
    assert driver.tokens(longer) == models.generated(FAMILY, [*prompt, 7, 8, 9], 6)
    assert driver.count("prompt_tokens_total", "prefix_cache") == 28 + 28, "7 full blocks of 4 tokens, twice"
    assert driver.count("step_rows_total", "prefill") - rows == 3 + 6, "what was found was not computed"
    assert driver.outputs[second][-1].cached_tokens == 28
    assert [event.cached_tokens for event in driver.events] == [0, 28, 28]
    check_experts(driver)


def test_a_whole_prompt_in_the_cache_still_computes_its_last_token(folder: Path) -> None:
    driver = Driver(folder)
    prompt = prompts(1, seed=6)[0][:8] or [5] * 8
    prompt = (prompt * 8)[:8]  # two full blocks
    keys = [driver.submit(prompt, 3)]
    driver.run()
    keys.append(driver.submit(prompt, 3))
    driver.run()
    assert driver.tokens(keys[0]) == driver.tokens(keys[1])
    assert driver.count("prompt_tokens_total", "prefix_cache") == 4, "the block of the last token is not taken"
    check_experts(driver)


def test_generated_tokens_are_found_again_too(folder: Path) -> None:
    driver = Driver(folder)
    prompt = prompts(1, seed=7)[0]
    first = driver.submit(prompt, 20)
    driver.run()
    turn = prompt + driver.tokens(first) + [9, 9]  # the next turn of a conversation
    second = driver.submit(turn, 4)
    driver.run()
    assert driver.tokens(second) == models.generated(FAMILY, turn, 4)
    known = (len(prompt) + 19) // 4 * 4
    assert driver.outputs[second][-1].cached_tokens == known
    check_experts(driver)


def test_preemption_changes_no_token_and_no_expert(folder: Path) -> None:
    """16 blocks of 4 for four requests that want 10 each: they are computed in turns."""
    driver = Driver(folder, kv_blocks=16)
    asked = [prompt[:12] for prompt in prompts(4, 40, seed=8)]
    keys = [driver.submit(prompt, 28) for prompt in asked]
    driver.run()
    assert driver.count("preemptions_total") > 0
    for key, prompt in zip(keys, asked, strict=True):
        assert driver.tokens(key) == models.generated(FAMILY, prompt, 28)
    check_experts(driver)
    assert driver.engine.blocks.used == 0


def test_abort_frees_blocks_wherever_the_request_is(folder: Path) -> None:
    driver = Driver(folder, max_batch=2)
    running, also, waiting = (driver.submit(prompt, 50) for prompt in prompts(3, seed=9))
    staged = driver.submit([1, 2, 3, 4, 5], 1, hand_over=True)
    for _ in range(3):
        driver.engine.step()
    assert driver.engine.blocks.used > 0
    for key in (running, also, waiting, "never heard of"):
        driver.engine.abort(key)
    driver.run()
    assert driver.engine.blocks.used == 2, "those of the staged one"
    driver.engine.abort(staged)
    driver.run()
    assert driver.engine.blocks.used == 0
    assert driver.outputs[running][-1].finish == driver.outputs[waiting][-1].finish == "abort"
    assert driver.count("requests_total", "abort") == 3
    aborted = [event for event in driver.events if event.finish == "abort"]
    assert len(aborted) == 2, "the one that waited had no experts"
    for event in aborted:
        np.testing.assert_array_equal(event.ids(), models.captured(FAMILY, event.tokens().tolist()))


def test_a_step_that_fails_ends_its_requests_and_no_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(folder)
    failing = driver.submit([5, 6, 7], 5)
    with monkeypatch.context() as patch:
        patch.setattr(driver.engine.model._model, "forward", lambda **_: 1 / 0)
        driver.run()
    assert driver.outputs[failing][-1].error == "ZeroDivisionError: division by zero"
    after = driver.submit([5, 6, 7], 5)
    driver.run()
    assert driver.tokens(after) == models.generated(FAMILY, [5, 6, 7], 5)
    assert driver.engine.blocks.used == 0
    assert driver.count("step_failures_total") == 1


def test_a_bug_in_the_loop_ends_the_thread_and_every_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = Driver(folder)
    ended = threading.Event()
    monkeypatch.setattr(driver.engine, "_schedule", lambda: [][0])
    waiting = driver.submit([5, 6, 7], 5)
    driver.engine.start(ended.set)
    assert ended.wait(120)
    driver.engine.close()
    assert not driver.engine.alive
    assert driver.engine.failure == "IndexError: list index out of range"
    assert driver.outputs[waiting][-1].finish == "abort", "nobody waits for ever"
    assert "Traceback" in capsys.readouterr().err


def test_the_thread_serves_and_closes(folder: Path) -> None:
    driver = Driver(folder)
    driver.engine.start()
    done, endless = driver.submit([5, 6, 7], 5), driver.submit([5, 6, 8], 200)
    deadline = time.monotonic() + 120
    while not (driver.outputs[done] and driver.outputs[done][-1].finish and driver.outputs[endless]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert driver.tokens(done) == models.generated(FAMILY, [5, 6, 7], 5)
    assert driver.engine.call(lambda: 3).result(120) == 3
    with pytest.raises(ConfigError, match="in use"):
        driver.engine.call(driver.engine.clear_cache).result(120)
    driver.engine.close()
    assert driver.outputs[endless][-1].finish == "abort"
    assert driver.engine.blocks.used == 0
    assert driver.kv[-1] == AllBlocksCleared()


# ------------------------------------------------------------------------------------------------------------ handoff


def test_handoff_gives_the_same_tokens_footprint_and_experts(folder: Path) -> None:
    prefill, decode = Driver(folder), Driver(folder, copy=1)
    for index, prompt in enumerate([[7], *prompts(6, 40, seed=10)]):
        given = prefill.submit(prompt, 1, hand_over=True)
        prefill.run()
        params = prefill.outputs[given][-1].kv_transfer_params
        assert params is not None
        assert params["do_remote_prefill"] is True
        assert params["do_remote_decode"] is False
        assert params["remote_request_id"] == given
        wire = footprint_of(params)
        assert wire is not None
        assert (wire.tokens, wire.missing, wire.layer_ids) == (len(prompt), 0, prefill.engine.model.capture.layer_ids)
        np.testing.assert_array_equal(wire.counts, footprint(models.captured(FAMILY, prompt), models.EXPERTS))

        data = prefill.engine.export(given)
        assert data is not None
        prefilled = CODEC.from_bytes(data)
        check_prefilled(prefilled, prompt, decode.engine.model)
        before = decode.count("step_rows_total", "prefill")
        key = decode.submit(prompt, 9, prefilled=prefilled)
        decode.run()
        assert decode.tokens(key) == models.generated(FAMILY, prompt, 9), index
        assert decode.count("step_rows_total", "prefill") - before == 1, "the last token alone, for its logits"
        assert prefill.engine.release(given, "fetched")
        assert not prefill.engine.release(given, "fetched"), "once"
        assert prefill.engine.export(given) is None
    check_experts(prefill)
    check_experts(decode)
    assert prefill.engine.blocks.used == decode.engine.blocks.used == 0


def test_a_handoff_uses_what_the_decode_worker_has_already(folder: Path) -> None:
    prefill, decode = Driver(folder), Driver(folder, copy=1)
    prompt = (prompts(1, 40, seed=11)[0] * 30)[:30]
    decode.submit(prompt[:17], 2)
    decode.run()
    given = prefill.submit(prompt, 1, hand_over=True)
    prefill.run()
    data = prefill.engine.export(given)
    assert data is not None
    key = decode.submit(prompt, 5, prefilled=CODEC.from_bytes(data))
    decode.run()
    assert decode.tokens(key) == models.generated(FAMILY, prompt, 5)
    assert decode.count("prompt_tokens_total", "prefix_cache") == 16
    assert decode.count("prompt_tokens_total", "transfer") == 13
    check_experts(decode)


def test_kv_of_another_prompt_or_model_is_refused(folder: Path) -> None:
    driver = Driver(folder)
    given = driver.submit([5, 6, 7, 8, 9], 1, hand_over=True)
    driver.run()
    data = driver.engine.export(given)
    assert data is not None
    good = CODEC.from_bytes(data)
    check_prefilled(good, [5, 6, 7, 8, 9], driver.engine.model)
    with pytest.raises(ConfigError, match="another prompt"):
        check_prefilled(good, [5, 6, 7, 8, 10], driver.engine.model)
    with pytest.raises(ConfigError, match="KV is of model"):
        check_prefilled(good._replace(identity="other"), [5, 6, 7, 8, 9], driver.engine.model)
    with pytest.raises(ConfigError, match="tensors came"):
        check_prefilled(good._replace(tensors={}), [5, 6, 7, 8, 9], driver.engine.model)
    narrow = {name: tensor[:, :1] for name, tensor in good.tensors.items()}
    with pytest.raises(ConfigError, match="this worker keeps"):
        check_prefilled(good._replace(tensors=narrow), [5, 6, 7, 8, 9], driver.engine.model)
    with pytest.raises(ConfigError, match="0 … 7"):
        check_prefilled(good._replace(expert_ids=good.expert_ids + 8), [5, 6, 7, 8, 9], driver.engine.model)
    fractions: Any = good.expert_ids * 1.0
    with pytest.raises(ConfigError, match="not integers"):
        check_prefilled(good._replace(expert_ids=fractions), [5, 6, 7, 8, 9], driver.engine.model)
    name, tensor = next(iter(good.tensors.items()))
    with pytest.raises(ConfigError, match=f"{name} holds values that are not finite"):
        check_prefilled(good._replace(tensors={**good.tensors, name: tensor / 0}), [5, 6, 7, 8, 9], driver.engine.model)
    assert len(data) <= most_bytes(driver.engine.model, 5)


def test_damaged_kv_is_one_line(folder: Path) -> None:
    driver = Driver(folder)
    given = driver.submit([5, 6, 7], 1, hand_over=True)
    driver.run()
    data = driver.engine.export(given)
    assert data is not None
    again = CODEC.from_bytes(CODEC.to_bytes(CODEC.from_bytes(data)))
    assert again.token_ids.tolist() == [5, 6, 7]
    rng = np.random.default_rng(0)
    for _ in range(200):
        broken = bytearray(data[: rng.integers(0, len(data) + 1)])
        for at in rng.integers(0, max(1, min(len(broken), 400)), 3):
            if at < len(broken):
                broken[at] = rng.integers(0, 256)
        with contextlib.suppress(InputError):  # and no other
            CODEC.from_bytes(bytes(broken))


def test_staged_kv_expires_and_makes_room(folder: Path) -> None:
    driver = Driver(folder, kv_ttl_s=600.0, kv_blocks=8)
    staged = [driver.submit([token] * 12, 1, hand_over=True) for token in (11, 12)]
    driver.run()
    assert driver.engine.blocks.used == 6
    big = driver.submit([13] * 20, 4)  # 6 blocks of the 8: one staged request must go before its time
    driver.run()
    assert driver.tokens(big) == models.generated(FAMILY, [13] * 20, 4)
    assert driver.count("kv_released_total", "evicted") >= 1
    assert driver.engine.export(staged[0]) is None, "the oldest"
    given = driver.submit([14] * 4, 1, hand_over=True)
    driver.run()
    assert driver.engine.export(given) is not None
    staged_now = driver.engine._staged._staged
    staged_now.update({key: one._replace(until=0.0) for key, one in staged_now.items()})  # their time is over
    driver.run()
    assert driver.engine.export(given) is None
    assert driver.count("kv_released_total", "expired") >= 1
    assert driver.engine.blocks.used == 0
    assert driver.count("kv_staged_total") == sum(
        driver.count("kv_released_total", why) for why in ("fetched", "dropped", "expired", "evicted", "shutdown")
    )


# ------------------------------------------------------------------------------------------------------------- events


def test_kv_events_tell_exactly_what_is_held(folder: Path) -> None:
    """A directory that follows the events predicts every prefix hit, evictions included."""
    driver = Driver(folder, kv_blocks=24, max_batch=3)
    held: dict[int | bytes, tuple[int | bytes | None, tuple[int, ...]]] = {}
    rng = np.random.default_rng(3)
    stems = [rng.integers(3, models.VOCAB, 16).tolist() for _ in range(4)]
    removed = 0
    for _ in range(40):
        prompt = stems[rng.integers(0, 4)][: rng.integers(4, 17)] + rng.integers(3, 9, rng.integers(1, 9)).tolist()
        parent, predicted = None, 0
        for start in range(0, (len(prompt) - 1) // 4 * 4, 4):
            block = (parent, tuple(prompt[start : start + 4]))
            match = next((digest for digest, known in held.items() if known == block), None)
            if match is None:
                break
            parent, predicted = match, predicted + 4
        key = driver.submit(prompt, int(rng.integers(1, 8)))
        driver.run()
        assert driver.outputs[key][-1].cached_tokens == predicted
        for event in driver.kv:
            if isinstance(event, BlockStored):
                assert (event.block_size, event.medium, event.group_idx) == (4, "GPU", 0)
                before = event.parent_block_hash
                assert before is None or before in held
                for index, digest in enumerate(event.block_hashes):
                    assert digest not in held, "stored once"
                    held[digest] = (before, tuple(event.token_ids[4 * index : 4 * index + 4]))
                    before = digest
            elif isinstance(event, BlockRemoved):
                removed += len(event.block_hashes)
                for digest in event.block_hashes:
                    del held[digest]
        driver.kv.clear()
    assert removed > 20, "room had to be made"
    driver.engine.clear_cache()
    assert driver.kv == [AllBlocksCleared()]
    assert driver.count("prefix_blocks_total", "hit") > 20


def test_the_cache_is_not_cleared_under_a_request(folder: Path) -> None:
    driver = Driver(folder)
    driver.submit([5, 6, 7], 20)
    driver.engine.step()
    with pytest.raises(ConfigError, match="1 of 64 KV blocks are in use"):
        driver.engine.clear_cache()


# ----------------------------------------------------------------------------------------------------------- sampling


def test_a_seed_means_the_same_in_any_batch(folder: Path) -> None:
    alone, together = Driver(folder), Driver(folder, copy=1)
    prompt = prompts(1, seed=12)[0]
    settings: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
    one = alone.submit(prompt, 12, **settings)
    alone.run()
    for other in prompts(5, seed=13):
        together.submit(other, 12, temperature=1.0, seed=3)
    two = together.submit(prompt, 12, **settings)
    three = together.submit(prompt, 12, **{**settings, "seed": 8})
    together.run()
    assert alone.tokens(one) == together.tokens(two)
    assert alone.tokens(one) != together.tokens(three)


def test_ends_at_the_models_end_token_unless_told_not_to(folder: Path, tmp_path: Path) -> None:
    prompt = prompts(1, seed=14)[0]
    free = models.generated(FAMILY, prompt, 20)
    end = next(token for token in free[4:] if token not in free[:4])
    shutil.copytree(folder, tmp_path / "model")
    settings = tmp_path / "model" / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token_id": [end, models.END]}))
    driver = Driver(tmp_path / "model")
    stops, goes_on = driver.submit(prompt, 20, ignore_eos=False), driver.submit(prompt, 20)
    stopped = driver.submit(prompt, 20, stop_token_ids=frozenset([free[3]]))
    driver.run()
    assert driver.tokens(stops) == free[: free.index(end) + 1] == models.generated(FAMILY, prompt, 20, eos=end)
    assert (driver.outputs[stops][-1].finish, driver.outputs[stops][-1].stop_reason) == ("stop", None)
    assert driver.tokens(goes_on) == free
    assert driver.tokens(stopped) == free[: free.index(free[3]) + 1]
    assert driver.outputs[stopped][-1].stop_reason == free[3]
    check_experts(driver)
