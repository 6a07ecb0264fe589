"""Bodies of clients: what only the gateway may set never passes, all else does, however the JSON is written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.gateway.exchange.call import OWNED, make_call
from coterie.net.http1.messages import HttpError

PATH = "/v1/completions"
NAMES = [*sorted(OWNED), "prompt", "messages", "tools", "cache_salt", "model", "stream", "seed", "x"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda part: st.lists(part, max_size=3),
    max_leaves=5,
)
SPACES = st.text(" \t\r\n", max_size=2)


def escaped(name: str, every: int) -> str:
    """A field's name as JSON, some of its characters written as escapes."""
    return '"' + "".join(f"\\u{ord(one):04x}" if n % every == 0 else one for n, one in enumerate(name)) + '"'


@given(
    st.lists(st.tuples(st.sampled_from(NAMES), VALUES, st.integers(1, 9)), max_size=6), SPACES, st.none() | st.text()
)
def test_only_what_is_owned_is_left_out(fields: list[tuple[str, Any, int]], space: str, salt: str | None) -> None:
    written = ",".join(f"{space}{escaped(name, every)}:{space}{json.dumps(value)}" for name, value, every in fields)
    data = f"{space}{{{written}{space}}}{space}".encode()
    wanted = json.loads(data)
    try:
        call = make_call(PATH, data, salt=salt)
    except HttpError:  # stream, model or salt of a wrong type
        return
    sent = json.loads(call.raw, object_pairs_hook=lambda pairs: pairs)
    assert OWNED.isdisjoint(name for name, _ in sent)
    own = wanted.get("cache_salt")
    if salt is not None:
        assert [value for name, value in sent if name == "cache_salt"] == [salt if own is None else f"{salt}/{own}"]
    kept = {name: value for name, value in json.loads(call.raw).items() if name != "cache_salt"}
    assert kept == {name: value for name, value in wanted.items() if name not in OWNED and name != "cache_salt"}
    assert call.body == json.loads(call.raw)
    if salt is None and OWNED.isdisjoint(wanted):
        assert call.raw == data, "byte for byte"


@pytest.mark.parametrize("field", sorted(OWNED))
def test_an_owned_field_is_seen_in_any_spelling(field: str) -> None:
    for every in (1, 2, 99):
        data = f'{{"prompt": "a", {escaped(field, every)}: {{"remote_host": "x"}}}}'.encode()
        assert json.loads(make_call(PATH, data).raw) == {"prompt": "a"}


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"3", b"{", b'{"a":}', b'{"prompt":"\xff"}', b'{"stream":1}', b'{"model":{}}', b'{"cache_salt":1}'],
)
def test_what_is_no_request_is_refused(data: bytes) -> None:
    with pytest.raises(HttpError) as found:
        make_call(PATH, data)
    assert found.value.status == 400
