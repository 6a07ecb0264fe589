"""A CoterieConnector that does nothing, for vLLM versions that lack an interface the real one needs."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class _NoMetadata(KVConnectorMetadata):
    pass


def _nothing(*_: Any, **__: Any) -> None:
    return None


_ANSWERS: dict[str, Any] = {
    "get_num_new_matched_tokens": lambda *_, **__: (0, False),
    "build_connector_meta": lambda *_, **__: _NoMetadata(),
    "request_finished": lambda *_, **__: (False, None),
    "request_finished_all_groups": lambda *_, **__: (False, None),
    "requires_kv_delivery": property(lambda _: False),
}
_bases: tuple[type, ...] = (KVConnectorBase_V1, *((base.SupportsHMA,) if hasattr(base, "SupportsHMA") else ()))
_abstract = {name for kind in _bases for name in getattr(kind, "__abstractmethods__", ())}

CoterieConnector = type(
    "CoterieConnector", _bases, {**dict.fromkeys(_abstract, _nothing), **_ANSWERS, "__doc__": __doc__}
)
