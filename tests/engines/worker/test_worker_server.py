"""Real workers in processes of their own: one prefills, one decodes, one does both, over HTTP and ZMQ.

The last tests of the file end workers on purpose.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")
import zmq

pytestmark = pytest.mark.torch


import transformers_models as models  # noqa: E402
from command_line import runner  # noqa: E402
from coterie.footprints import footprint  # noqa: E402
from coterie.net.processes import free_port  # noqa: E402
from coterie.wire.expert_events import Event, ExpertLoad, RequestExperts, decode_expert_events  # noqa: E402
from coterie.wire.footprints import footprint_of, without_footprint  # noqa: E402
from coterie.wire.framing import Gaps, from_frames  # noqa: E402
from coterie.wire.handoff import decode_body, prefill_body  # noqa: E402
from coterie.wire.kv_events import BlockStored, decode_kv_events  # noqa: E402
from worker_servers import (  # noqa: E402
    BAD,
    FAMILY,
    FIELDS,
    LIMIT,
    Worker,
    asking,
    prefill,
    prompts,
    serving,
    subscribe,
    tokens_of,
    until,
    values,
)

DECODERS = ("both", "decode")
TEXTS = ["experts", "a small text about routers", "the tokens they share, and the tokens they do not", "and " * 30, "q"]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    with serving(tmp_path_factory.mktemp("fleet")) as running:
        yield running


# --------------------------------------------------------------------------------------------------------- the handoff


def test_one_prefill_and_two_decode_workers_give_the_tokens_of_one(workers: dict[str, Worker]) -> None:
    asked = [*prompts(10, seed=1), [7]]
    alone = [models.generated(FAMILY, prompt, 12) for prompt in asked]
    results: dict[int, list[int]] = {}

    def one(index: int) -> None:
        body = asking(asked[index])
        params = prefill(workers, body)
        wire = footprint_of(params)
        assert wire is not None, "with every handoff, those of one token too"
        assert (wire.tokens, wire.missing) == (len(asked[index]), 0)
        np.testing.assert_array_equal(wire.counts, footprint(expected[index], models.EXPERTS))
        worker = workers[DECODERS[index % 2]]
        results[index] = tokens_of(worker.complete(decode_body(body, without_footprint(params))))

    expected = [models.captured(FAMILY, prompt) for prompt in asked]
    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results.get(index) for index in range(len(asked))] == alone
    for name, share in zip(DECODERS, (asked[::2], asked[1::2]), strict=True):
        assert workers[name].series("kv_fetch_total", outcome="ok") == len(share)
        assert workers[name].series("prompt_tokens_total", source="transfer") == sum(
            len(prompt) - 1 for prompt in share
        )
        assert workers[name].series("prompt_tokens_total", source="computed") == len(share), "the last token of each"
        assert workers[name].series("step_rows_total", phase="prefill") == len(share)
    until(lambda: workers["prefill"].series("kv_released_total", why="fetched") == len(asked))
    assert workers["prefill"].series("kv_blocks", state="used") == 0
    again = [tokens_of(workers["both"].complete(asking(prompt))) for prompt in asked]
    assert again == alone, "and those of one worker that does it all"


def test_kv_that_is_gone_is_computed_anew_with_the_same_tokens(workers: dict[str, Worker]) -> None:
    body = asking(prompts(3, seed=2)[2])
    right = models.generated(FAMILY, body["prompt"], 12)
    worker = workers["decode"]
    params = prefill(workers, body)
    path = f"/kv/{params['remote_request_id']}"
    assert workers["prefill"].send("DELETE", path).status == 204
    assert workers["prefill"].send("DELETE", path).status == 404
    assert workers["prefill"].send("GET", path).status == 404
    for change, outcome in (
        ({}, "missing"),
        ({"remote_port": free_port()}, "unreachable"),
        ({"remote_request_id": "never-heard-of"}, "missing"),
    ):
        before = worker.series("kv_fetch_total", outcome=outcome)
        assert tokens_of(worker.complete(decode_body(body, {**params, **change}))) == right
        assert worker.series("kv_fetch_total", outcome=outcome) == before + 1
    other = prefill(workers, asking([9, 9, 9]))  # KV of another prompt
    assert tokens_of(worker.complete(decode_body(body, other))) == right
    assert worker.series("kv_fetch_total", outcome="mismatch") == 1
    assert workers["prefill"].series("kv_released_total", why="dropped") == 1


def test_kv_nobody_fetches_is_let_go_in_time(workers: dict[str, Worker]) -> None:
    worker = workers["both"]
    until(lambda: worker.series("kv_staged") == 0)
    before = worker.series("kv_released_total", why="expired"), worker.series("kv_staged_total")
    assert worker.post(prefill_body(asking(prompts(1, seed=3)[0]))).status == 200
    assert worker.series("kv_staged_total") == before[1] + 1
    until(lambda: worker.series("kv_staged") == 0)
    assert worker.series("kv_released_total", why="expired") == before[0] + 1
    until(lambda: worker.series("kv_blocks", state="used") == 0)


def test_a_client_that_goes_while_kv_is_fetched_has_it_dropped(workers: dict[str, Worker]) -> None:
    """The prefill worker is a socket here that never answers; it must be told to let go."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        params = {
            "do_remote_prefill": True,
            "remote_host": "127.0.0.1",
            "remote_port": silent.getsockname()[1],
            "remote_request_id": "abc",
        }
        with socket.create_connection(("127.0.0.1", workers["decode"].port)) as client:
            data = json.dumps(asking([5, 6], kv_transfer_params=params)).encode()
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
            fetch, _ = silent.accept()
            assert fetch.recv(4096).startswith(b"GET /kv/abc ")
        silent.settimeout(120)
        drop, _ = silent.accept()
        with drop, fetch:
            assert drop.recv(4096).startswith(b"DELETE /kv/abc ")
            drop.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
    until(lambda: workers["decode"].series("kv_fetch_total", outcome="cancelled") == 1)
    assert workers["decode"].series("kv_blocks", state="used") == 0


def test_roles_are_kept(workers: dict[str, Worker]) -> None:
    status, answer = workers["prefill"].post(asking([5]))
    assert (status, "role prefill" in answer["error"]["message"]) == (400, True)
    status, answer = workers["decode"].post(prefill_body(asking([5])))
    assert (status, "role decode" in answer["error"]["message"]) == (400, True)
    status, answer = workers["both"].post({**prefill_body(asking([5])), "max_tokens": 2})
    assert (status, "max_tokens=1" in answer["error"]["message"]) == (400, True)


# ------------------------------------------------------------------------------------------------------ OpenAI's bodies


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_pieces_are_the_whole_answer(workers: dict[str, Worker], text: str) -> None:
    worker = workers["both"]
    body = asking(text, 20)
    whole = worker.complete(body)
    chunks = worker.stream({**body, "stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 20
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [token for choice in choices for token in choice["token_ids"]] == tokens_of(whole)
    assert choices[0]["prompt_token_ids"] == whole["choices"][0]["prompt_token_ids"]
    assert [choice["finish_reason"] for choice in choices] == [None] * 19 + ["length"]
    decoded = models.tokenizer().decode(tokens_of(whole), skip_special_tokens=True)
    assert whole["choices"][0]["text"] == decoded


def test_chat(workers: dict[str, Worker]) -> None:
    parts = [{"type": "text", "text": "a small"}, {"type": "text", "text": " text"}]
    body = {
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    whole = workers["both"].complete(body, "/v1/chat/completions")
    ids = models.tokenizer().encode("<user>a small\n text</user><model>")
    assert whole["prompt_token_ids"] == ids
    assert whole["object"] == "chat.completion"
    same = workers["both"].complete(asking(ids, 6))
    assert tokens_of(whole) == tokens_of(same)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": same["choices"][0]["text"]}
    chunks = workers["both"].stream(body, "/v1/chat/completions")
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    pieces = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]


def test_stop_strings_end_the_answer_before_them(workers: dict[str, Worker]) -> None:
    text = workers["both"].complete(asking(TEXTS[1], 30))["choices"][0]["text"]
    stop = text[5:8]
    body = asking(TEXTS[1], 30, stop=[stop, "no such words"])
    choice = workers["both"].complete(body)["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert "".join(chunk["choices"][0]["text"] for chunk in workers["both"].stream(body)) == choice["text"]


def test_prefix_hits_are_counted_in_the_answer(workers: dict[str, Worker]) -> None:
    prompt = (prompts(1, seed=20)[0] * 40)[:33]
    first, second = (workers["both"].complete(asking(prompt)) for _ in range(2))
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
    assert tokens_of(first) == tokens_of(second)
    until(lambda: workers["both"].send("POST", "/reset_prefix_cache").status == 200)
    third = workers["both"].complete(asking(prompt))
    assert third["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_the_request_id_comes_back(workers: dict[str, Worker]) -> None:
    status, answer = workers["both"].post(asking([5], 1), **{"X-Request-Id": "my-own"})
    assert (status, answer["id"]) == (200, "cmpl-my-own")


def test_models_lists_the_one(workers: dict[str, Worker]) -> None:
    (card,) = workers["both"].send("GET", "/v1/models").body["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", LIMIT)


@pytest.mark.parametrize("wrong", BAD)
def test_bad_input_says_what_would_be_right(workers: dict[str, Worker], wrong: str) -> None:
    change, status, words = BAD[wrong]
    answered = workers["both"].post({**asking([5, 6, 7]), **change})
    assert answered.status == status
    error = answered.body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error"), "as the gateway's"
    assert words in error["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 60_000, b'{"prompt": "x"}' + b"\0", b'"' + b"a" * 100]
)
def test_what_is_no_object_is_refused(workers: dict[str, Worker], body: bytes) -> None:
    status, answer = workers["both"].send("POST", "/v1/completions", body)
    assert status == 400
    assert answer["error"]["message"]


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    change=st.dictionaries(st.sampled_from(FIELDS), values, min_size=1, max_size=3),
    params=st.none()
    | st.fixed_dictionaries(
        {"do_remote_prefill": st.booleans()},
        optional={
            "do_remote_decode": values,
            "remote_host": values,
            "remote_port": st.sampled_from([1, "x", None]),
            "remote_request_id": values,
        },
    ),
    chat=st.booleans(),
)
def test_no_body_makes_the_worker_fail(
    workers: dict[str, Worker], change: dict[str, Any], params: Any, chat: bool
) -> None:
    body: dict[str, Any] = {"prompt": [5, 6, 7], "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    if params is not None:
        body["kv_transfer_params"] = params
    path = "/v1/chat/completions" if chat else "/v1/completions"
    status, _ = workers["both"].post({**body, **change}, path)
    assert status in (200, 400, 404), (body, change)


def test_after_all_that_nothing_is_left_over(workers: dict[str, Worker]) -> None:
    worker = workers["both"]
    until(lambda: worker.series("kv_staged") == 0)
    until(lambda: worker.series("kv_blocks", state="used") == 0)
    assert worker.series("step_failures_total") == 0
    assert worker.series("requests_total", outcome="error") == 0
    status, answer = worker.send("GET", "/no/such/path")
    assert (status, "/v1/completions" in answer["error"]["message"]) == (404, True)
    assert worker.send("GET", "/v1/completions").status == 405


# ------------------------------------------------------------------------------------------------ clients that go away


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_blocks(workers: dict[str, Worker], stream: bool) -> None:
    worker = workers["both"]

    def ended(outcome: str) -> float:
        return worker.series("requests_total", outcome=outcome)

    aborted = ended("abort")
    data = json.dumps(asking([5, 6, 7], 250, stream=stream)).encode()
    for _ in range(20):  # on a busy machine a request may end before the client has gone
        finished = ended("length")
        with socket.create_connection(("127.0.0.1", worker.port)) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
            until(lambda: worker.series("running") == 1 or ended("length") > finished)  # noqa: B023
        until(lambda: ended("abort") > aborted or ended("length") > finished)  # noqa: B023
        if ended("abort") > aborted:
            break
    assert ended("abort") == aborted + 1
    assert worker.series("kv_blocks", state="used") == 0
    assert worker.series("running") == 0


# ------------------------------------------------------------------------------------------------------------- events


def test_events_of_a_handoff_tell_experts_and_blocks(workers: dict[str, Worker]) -> None:
    context = zmq.Context()
    worker = workers["decode"]
    experts, kv = subscribe(context, worker.expert_port, b"experts"), subscribe(context, worker.kv_port, b"kv")
    try:
        rng = np.random.default_rng(21)
        sent: list[list[int]] = []
        for _ in range(50):  # a subscription takes a moment to arrive
            body = asking(rng.integers(3, models.VOCAB, 20).tolist(), 8)
            params = prefill(workers, body)
            sent.append([*body["prompt"], *tokens_of(worker.complete(decode_body(body, params)))])
            if experts.poll(100):
                break
        gaps = Gaps()
        seen: list[Event] = []
        while not any(isinstance(event, RequestExperts) for event in seen):
            frame = from_frames(experts.recv_multipart())
            assert gaps.see(frame.seq) == 0
            seen += decode_expert_events(frame.payload).events
        event = next(event for event in seen if isinstance(event, RequestExperts))
        assert event.tokens().tolist() in [tokens[:-1] for tokens in sent], "the last was never fed back"
        assert (event.model, event.finish, event.prompt_tokens, event.output_tokens) == ("tiny", "length", 20, 8)
        np.testing.assert_array_equal(event.ids(), models.captured(FAMILY, event.tokens().tolist()))
        assert event.seen().all(), "those fetched from the prefill worker too"
        while not any(isinstance(event, ExpertLoad) for event in seen):
            seen += decode_expert_events(from_frames(experts.recv_multipart()).payload).events
        load = next(event for event in seen if isinstance(event, ExpertLoad))
        assert load.load().sum() == load.tokens * models.TOP_K * len(load.layer_ids)

        batch = decode_kv_events(from_frames(kv.recv_multipart()).payload)
        stored = batch.events[0]
        assert isinstance(stored, BlockStored)
        assert stored.parent_block_hash is None
        assert (stored.block_size, len(stored.token_ids)) == (8, 8 * len(stored.block_hashes))
    finally:
        experts.close()
        kv.close()
        context.term()
    # Both subscribers are gone: serving goes on.
    assert workers["decode"].complete(asking([5, 6], 4))


# ------------------------------------------------------------------------------------------- wrong starts, and endings


def test_a_wrong_start_is_one_line(
    workers: dict[str, Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runner(monkeypatch, capsys, "worker")

    def fail(*options: str) -> str:
        ran = run(*options)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1), ran.err
        return ran.err

    model = str(workers["both"].process.argv[workers["both"].process.argv.index("--model") + 1])
    used = str(workers["both"].port)
    assert "does not exist" in fail("--model", str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    assert "config.json" in fail("--model", str(tmp_path / "empty"))
    assert "choose another port" in fail("--model", model, "--port", used)
    assert "must be one of prefill, decode, both" in fail("--model", model, "--role", "all")
    assert "must begin with tcp://" in fail("--model", model, "--kv-events", "udp://*:1")
    assert "cannot publish there" in fail("--model", model, "--port", "0", "--kv-events", "tcp://127.0.0.1:x")
    taken = f"tcp://127.0.0.1:{workers['both'].kv_port}"
    assert "cannot publish there" in fail("--model", model, "--port", "0", "--kv-events", taken)
    assert "set COTERIE_FLEET_SECRET and COTERIE_WORKER_KEY" in fail("--model", model, "--host", "0.0.0.0")
    assert "must be one of float32" in fail("--model", model, "--dtype", "int3")
    assert "kv_ttl_s=-1.0 must be a finite number above 0" in fail("--model", model, "--kv-ttl", "-1")
    monkeypatch.setenv("COTERIE_FLEET_SECRET", "0123456789abcdef")
    monkeypatch.setenv("COTERIE_WORKER_KEY", "0123456789abcdef")
    assert "host 'no.such.host.invalid'" in fail("--model", model, "--host", "no.such.host.invalid")


def test_a_worker_killed_in_a_prefill_costs_only_time(workers: dict[str, Worker]) -> None:
    """It holds one request it never answers and KV nobody can fetch any more; decode workers compute both."""
    bodies = [asking(prompt) for prompt in prompts(2, seed=30)]
    right = [models.generated(FAMILY, body["prompt"], 12) for body in bodies]
    params = prefill(workers, bodies[0])
    victim = workers["prefill"]
    failures: list[BaseException] = []

    def hopeless() -> None:
        try:
            victim.post(prefill_body(bodies[1]))
        except (OSError, http.client.HTTPException) as error:
            failures.append(error)

    os.kill(victim.process.pid, signal.SIGSTOP)  # so that it is certainly in the middle
    caller = threading.Thread(target=hopeless)
    caller.start()
    time.sleep(0.2)
    assert victim.process.kill() == -signal.SIGKILL
    caller.join(120)
    assert len(failures) == 1
    worker = workers["decode"]
    before = worker.series("kv_fetch_total", outcome="unreachable")
    assert tokens_of(worker.complete(decode_body(bodies[0], params))) == right[0]
    assert worker.series("kv_fetch_total", outcome="unreachable") == before + 1
    assert tokens_of(worker.complete(bodies[1])) == right[1]


def test_sigterm_lets_requests_end_and_takes_no_new_ones(workers: dict[str, Worker]) -> None:
    worker = workers["decode"]
    body = asking([5, 6, 7], 120)
    right = models.generated(FAMILY, body["prompt"], 120)
    answers: list[dict[str, Any]] = []
    caller = threading.Thread(target=lambda: answers.append(worker.complete(body)))
    caller.start()
    until(lambda: worker.series("running") == 1 or bool(answers))
    worker.process.signal(signal.SIGTERM)
    refused: list[int] = []
    while caller.is_alive():
        with contextlib.suppress(OSError, http.client.HTTPException):
            refused.append(worker.post(asking([5], 1)).status)
        time.sleep(0.05)
    caller.join()
    assert tokens_of(answers[0]) == right
    assert set(refused) <= {503}
    until(lambda: worker.process.returncode is not None)
    assert worker.process.stop() == 0
    assert worker.process.log_text().count("Ready: ") == 1
