"""What the vLLM tests hold a server's answers and events against."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.engines.tiny import tiny_model_path
from coterie.engines.transformers.capture import ExpertCapture
from coterie.engines.vllm.recording import Subscriber
from coterie.footprints import footprint
from coterie.wire.expert_events import RequestExperts
from coterie.wire.footprints import WireFootprint, footprint_of

NUM_EXPERTS = 32
TIE = 1e-5
"""Router probabilities closer than this may be ordered either way by two correct programs."""


class Truth:
    """The experts of any token sequence, by transformers."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=torch.float32).eval()

    def experts(self, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """ids [token, layer, k], and router probabilities [token, layer, expert]."""
        with torch.no_grad(), ExpertCapture(self.model) as capture:
            out = self.model(torch.tensor([tokens]), output_router_logits=True)
            ids = capture.take().expert_ids
        logits = torch.stack([layer.reshape(len(tokens), -1) for layer in out.router_logits], 1)
        return ids, logits.softmax(-1).numpy()

    def differing(self, tokens: list[int], ids: np.ndarray) -> int:
        """Token-layers whose experts differ from the truth, ties aside."""
        ours, probabilities = self.experts(tokens)
        assert ids.shape == ours.shape
        wrong = 0
        for token, layer in np.argwhere((np.sort(ours, -1) != np.sort(ids, -1)).any(-1)):
            p = probabilities[token, layer]
            apart = set(ours[token, layer].tolist()) ^ set(ids[token, layer].tolist())
            wrong += max(p[list(apart)]) - min(p[list(apart)]) > TIE
        return wrong

    def footprint(self, tokens: list[int]) -> np.ndarray:
        """[layer, expert]"""
        return footprint(self.experts(tokens)[0], NUM_EXPERTS)


class Listener(threading.Thread):
    """Every request event of a server, by the id it was sent under."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(daemon=True)
        self.subscriber = Subscriber(endpoint)
        self.subscriber.wait(120)
        self.found: dict[str, RequestExperts] = {}
        self.stopping = False
        self.start()

    def run(self) -> None:
        while not self.stopping:
            for event in self.subscriber.events(0.2):
                if isinstance(event, RequestExperts):
                    self.found[event.request_id] = event

    def wait(self, count: int, seconds: float = 120) -> dict[str, RequestExperts]:
        until = time.monotonic() + seconds
        while len(self.found) < count and time.monotonic() < until:
            time.sleep(0.02)
        self.stopping = True
        self.join()
        self.subscriber.close()
        return self.found


def event_of(found: dict[str, RequestExperts], request_id: str) -> RequestExperts:
    matching = [event for name, event in found.items() if request_id in name]
    assert len(matching) == 1, f"{request_id}: {len(matching)} events"
    return matching[0]


def sent_footprint(answer: dict[str, Any]) -> WireFootprint:
    found = footprint_of(answer["kv_transfer_params"])
    assert found is not None
    return found


def sequence(answer: dict[str, Any]) -> list[int]:
    choice = answer["choices"][0]
    return [*choice["prompt_token_ids"], *choice["token_ids"]]


def dense_model(folder: Path) -> Path:
    """A model without experts, with the tokenizer of coterie-tiny."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shutil.copytree(tiny_model_path(), folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
