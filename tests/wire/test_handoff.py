"""The prefill/decode handshake: what is changed in a body, and what must not be."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from coterie.wire.handoff import REMOTE_DECODE, decode_body, prefill_body

CHANGED = {"stream", "stream_options", "min_tokens", "max_tokens", "max_completion_tokens", "kv_transfer_params"}

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
bodies = st.dictionaries(st.sampled_from([*sorted(CHANGED), "model", "prompt", "n", "seed"]), values)


@given(bodies)
def test_prefill_asks_for_one_token_and_changes_nothing_else(body: dict[str, Any]) -> None:
    before = copy.deepcopy(body)
    sent = prefill_body(body)
    assert body == before, "the client's body is needed again, for the decode worker"
    assert (sent["stream"], sent["max_tokens"]) == (False, 1)
    assert sent.get("max_completion_tokens", 1) == 1
    assert ("max_completion_tokens" in sent) == ("max_completion_tokens" in body)
    assert not {"stream_options", "min_tokens"} & set(sent)
    assert sent["kv_transfer_params"] == REMOTE_DECODE
    assert {k: v for k, v in sent.items() if k not in CHANGED} == {k: v for k, v in body.items() if k not in CHANGED}
    json.dumps(sent)


def test_the_request_for_a_remote_decode_is_vllms() -> None:
    assert json.dumps(REMOTE_DECODE) == (
        '{"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null, "remote_block_ids": null, '
        '"remote_host": null, "remote_port": null}'
    )


def test_bodies_do_not_share_the_parameters() -> None:
    prefill_body({})["kv_transfer_params"]["remote_host"] = "elsewhere"
    assert REMOTE_DECODE["remote_host"] is None


@given(bodies, st.none() | st.dictionaries(st.text(max_size=8), values, max_size=4))
def test_decode_is_the_clients_body_with_the_answers_parameters(
    body: dict[str, Any], params: dict[str, Any] | None
) -> None:
    before = copy.deepcopy((body, params))
    sent = decode_body(body, params)
    assert (body, params) == before
    expected = {**body, "kv_transfer_params": params} if params else body
    assert sent == expected
    sent["added"] = 1
    assert "added" not in body
