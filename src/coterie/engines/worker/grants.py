"""Grants: signed permissions to fetch the KV of one prompt, once.

A prefill worker puts a grant into the ``kv_transfer_params`` of its answer: an expiry and an HMAC, with the fleet's
secret, over the request's key, the digest of its prompt and cache salt, and the expiry. The decode worker checks it
before it opens a connection, so a client cannot make up an address or use another prompt's KV; the prefill worker
checks it before it sends KV, and sends it once.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import time
from collections.abc import Sequence

import numpy as np

from coterie.engines.worker.blocks import salt_digest
from coterie.errors import CoterieError

FIELD = "coterie_grant"
"""Name in ``kv_transfer_params``."""
HEADER = "X-Coterie-Grant"
_FORM = re.compile(r"1\.([0-9]{1,12})\.([0-9a-f]{64})")


class GrantError(CoterieError):
    """KV was asked for without a grant for it."""


def prompt_digest(prompt: Sequence[int], salt: str | None) -> bytes:
    """Digest of a prompt in its tenant's cache."""
    return hashlib.sha256(salt_digest(salt) + np.asarray(prompt, "<i4").tobytes()).digest()


class Grants:
    """Signs and checks grants; without a secret there are none, and none is asked for."""

    def __init__(self, secret: str | None) -> None:
        self._key = None if secret is None else hmac.digest(secret.encode(), b"coterie grants 1", "sha256")

    def sign(self, request: str, digest: bytes, until: float) -> str | None:
        """Grant for the KV of a request, until a time in seconds since the epoch."""
        if self._key is None:
            return None
        seconds = math.ceil(until)
        return f"1.{seconds}.{self._signature(self._key, request, digest, seconds)}"

    def valid(self, grant: str | None, request: str, digest: bytes) -> bool:
        if self._key is None:
            return True
        found = _FORM.fullmatch(grant or "")
        if found is None:
            return False
        seconds = int(found[1])
        right = self._signature(self._key, request, digest, seconds)
        return hmac.compare_digest(right, found[2]) and time.time() <= seconds

    @staticmethod
    def _signature(key: bytes, request: str, digest: bytes, seconds: int) -> str:
        return hmac.new(key, b"%s\0%s%d" % (request.encode(), digest, seconds), "sha256").hexdigest()
