"""Token ids of chats that vLLM renders in its own code: the gateway's equal vLLM's, its cached tokens vLLM's counter.

DeepSeek-V3.2's renderer runs on coterie-tiny. gpt-oss's needs openai_harmony's vocabulary, which is downloaded from
elsewhere: its cases run where ``TIKTOKEN_ENCODINGS_BASE`` names a folder with ``o200k_base.tiktoken``.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from coterie.engines.tiny import tiny_model_path
from coterie.gateway.config import GatewayConfig, LimitSettings, WorkerEntry
from coterie.gateway.fleet.spec import RouterSpec
from gateway_runs import FAST, gateway
from http1_peers import until
from vllm_servers import BLOCK_SIZE, MODEL, Fleet, Server, needs_vllm

pytestmark = [pytest.mark.vllm, needs_vllm]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HARMONY = os.environ.get("TIKTOKEN_ENCODINGS_BASE")
KINDS = [
    "deepseek_v32",
    pytest.param("gpt_oss", marks=pytest.mark.skipif(HARMONY is None, reason="needs TIKTOKEN_ENCODINGS_BASE")),
]
SERVED = ("--enable-scale-out", "--enable-prompt-tokens-details", "--max-model-len", "1024")
SYSTEM = {"role": "system", "content": "You count the birds of a pond, and say a number and a name. " * 3}
TOOL = {
    "type": "function",
    "function": {
        "name": "pond",
        "description": "A pond's birds, 鳥",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "pond", "arguments": '{"name": "lake"}'}}
SHARED_BODIES: list[dict[str, Any]] = [
    {"messages": [SYSTEM, {"role": "user", "content": "How many herons?"}]},
    {"messages": [SYSTEM, {"role": "user", "content": "How many herons?"}]},
    {
        "messages": [
            SYSTEM,
            {"role": "user", "content": "How many herons?"},
            {"role": "assistant", "content": "Two.", "reasoning": "I see them."},
            {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "geese?"}]},
        ]
    },
    {
        "messages": [
            SYSTEM,
            {"role": "user", "content": "Which?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "a heron"},
        ],
        "tools": [TOOL],
        "tool_choice": "none",
    },
]
BODIES: dict[str, list[dict[str, Any]]] = {
    "deepseek_v32": [
        *SHARED_BODIES,
        {**SHARED_BODIES[0], "chat_template_kwargs": {"thinking": True}},
        {**SHARED_BODIES[2], "reasoning_effort": "high"},
    ],
    "gpt_oss": [
        *SHARED_BODIES,
        {**SHARED_BODIES[0], "reasoning_effort": "low"},
        {"messages": [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "Hi"}]},
    ],
}
HARMONY_PATTERN = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)


def gpt_oss_model(folder: Path) -> Path:
    """A gpt-oss of two small layers without weights, and the model's vocabulary."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    folder.mkdir()
    special = ["startoftext", "endoftext", "reserved_200000", "reserved_200001", "return", "constrain"]
    special += ["reserved_200004", "channel", "start", "end", "message", "reserved_200009", "reserved_200010"]
    names = [f"<|{name}|>" for name in (*special, "reserved_200011", "call")]
    vocabulary = str(Path(HARMONY or "") / "o200k_base.tiktoken")
    made = TikTokenConverter(vocabulary, pattern=HARMONY_PATTERN, extra_special_tokens=names).converted()
    made.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|return|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    config = {
        **{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True},
        **{"experts_per_token": 2, "num_experts_per_tok": 2, "num_local_experts": 4, "intermediate_size": 64},
        **{"hidden_size": 64, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128},
        **{"max_position_embeddings": 4096, "initial_context_length": 4096, "rope_theta": 150000, "swiglu_limit": 7.0},
        **{"vocab_size": 201088, "eos_token_id": 200002, "pad_token_id": 199999, "torch_dtype": "float32"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def deepseek_model(folder: Path) -> Path:
    """coterie-tiny's vocabulary for the gateway, with the name of a model that vLLM renders in its own code."""
    shutil.copytree(tiny_model_path(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, "model_type": "deepseek_v32"}))
    return folder


@pytest.fixture(scope="module", params=KINDS)
def own(request: pytest.FixtureRequest, fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Kind of renderer, folder of the model for the gateway, and the server."""
    kind, root = request.param, tmp_path_factory.mktemp("own")
    if kind == "gpt_oss":
        folder = gpt_oss_model(root / "model")
        # By default vLLM 0.32 keeps few blocks of layers with a sliding window, and counts no hit without them.
        kept = ("--prefix-cache-retention-interval", str(BLOCK_SIZE))
        how: dict[str, Any] = {"model": folder, "extra": (*SERVED, *kept, "--load-format", "dummy")}
    else:
        folder, how = deepseek_model(root / "model"), {"extra": (*SERVED, "--tokenizer-mode", kind)}
    (server,) = fleet.start({kind: {**how, "kv_events": True}})
    yield kind, folder, server
    fleet.stop(kind)


@pytest.mark.parametrize("local", [True, False])
def test_ids_and_cached_tokens_are_vllms(own: tuple[str, Path, Server], local: bool) -> None:
    """With the model's tokenizer in the gateway, which makes texts, and without one."""
    kind, folder, server = own
    worker = WorkerEntry(id="w", url=server.url, kv_events=server.kv_events, kv_replay=server.kv_replay)
    config = GatewayConfig(
        listen="127.0.0.1:0",
        workers=[worker],
        tokenizer=str(folder) if local else None,
        block_size=BLOCK_SIZE,
        health=FAST,
        decode=RouterSpec("joint"),
        limits=LimitSettings(tokenise_s=300.0),
    )
    # Prompts of their own for each run: nothing of them is cached before.
    salt = {"cache_salt": f"{kind} {local}"}
    asked = [(CHAT, body) for body in BODIES[kind]] + [(COMPLETIONS, {"prompt": "How many ducks? 鴨 " * 20})] * 2

    async def test() -> None:
        async with gateway(config) as found:
            knowledge = found.running.parts.knowledge
            streams = knowledge.streams["decode"]
            await until(lambda: streams.connected("w") and found.open("decode") == {"w"})
            reported = []
            for path, prompt in asked:
                body = {"model": MODEL, "max_tokens": 2, "temperature": 0, "return_token_ids": True, **salt, **prompt}
                got = await found.client.ask("POST", path, body)
                assert got.status == 200, got.body
                answer = got.json
                right = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
                ids = (await knowledge.tokens.ids(path, body, ask=True)).ids
                assert ids is not None
                assert ids.tolist() == right
                decision = (await found.client.ask("GET", "/decisions?last=1")).json["decisions"][0]
                assert decision["prompt_tokens"] == len(right)
                reported.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
                assert decision["cached_tokens"] == reported[-1]
                held = (len(right) - 1) // BLOCK_SIZE * BLOCK_SIZE
                await until(lambda: streams.cached(np.array(right), 1, salt["cache_salt"])[0] == held)  # noqa: B023
            assert reported[0] == 0
            assert reported[1] >= BLOCK_SIZE, "the same chat again"
            assert reported[-1] >= BLOCK_SIZE, "the same text again"
            counters = knowledge.tokens.counters
            assert (counters["exact"], counters["unanswered"]) == (int(local), 0)

    async def ended() -> None:
        async with asyncio.timeout(600):
            await test()

    asyncio.run(ended())
