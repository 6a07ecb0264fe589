"""vLLM's prefill/decode handshake: one OpenAI request becomes two, sent one after the other.

The prefill worker answers with one token and ``kv_transfer_params``. The parameters are added unchanged to the original
body, which is then sent to a decode worker under the same ``X-Request-Id``. The decode worker is chosen in between,
when the request's footprint is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REQUEST_ID_HEADER = "X-Request-Id"
DP_RANK_HEADER = "X-data-parallel-rank"

GRANT = "coterie_grant"
"""Key in ``kv_transfer_params`` that holds a reference worker's permission to fetch the KV."""

REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""``kv_transfer_params`` that ask a worker to prefill a request that another worker decodes."""


def prefill_body(body: Mapping[str, Any], ids: bool = False, limit: str = "max_tokens") -> dict[str, Any]:
    """Return the body for the prefill worker: one output token, not streamed. `ids`: also ask for the prompt's ids.

    `limit` is the endpoint's field with the most tokens of an answer.
    """
    kept = {key: value for key, value in body.items() if key not in ("stream_options", "min_tokens")}
    one_token = {limit: 1} | ({"max_completion_tokens": 1} if "max_completion_tokens" in body else {})
    more = {"return_token_ids": True} if ids else {}
    return kept | one_token | more | {"stream": False, "kv_transfer_params": dict(REMOTE_DECODE)}


def decode_body(body: Mapping[str, Any], params: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the body for the decode worker: the client's body with the prefill answer's ``kv_transfer_params``."""
    return {**body, "kv_transfer_params": dict(params)} if params else dict(body)
