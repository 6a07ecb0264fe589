"""The reference worker without torch: tokenizer and forward pass against the libraries', and KV on the wire."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.engines.tiny import tiny_model_path
from coterie.engines.worker.model import RequestRows
from coterie.engines.worker.numpy_model import BytePairs, NumpyModel
from coterie.engines.worker.transfer import Prefilled, numpy_codec
from coterie.errors import ConfigError, InputError
from coterie.prompts import load_prompts

PAIRS = BytePairs(tiny_model_path())
CODEC = numpy_codec()
MODEL = NumpyModel(tiny_model_path(), num_blocks=64, block_size=16)


def chat(text: str) -> str:
    return PAIRS.apply_chat_template([{"role": "user", "content": text}])


@given(st.text())
def test_decoding_gives_the_text_back(text: str) -> None:
    assert PAIRS.decode(PAIRS.encode(text), skip_special_tokens=False) == text


def test_special_tokens_are_single_and_may_be_skipped() -> None:
    ids = PAIRS.encode("<|im_start|>user\n17<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert PAIRS.decode(ids) == "user\n17"


def test_a_step_does_not_depend_on_chunks_or_company() -> None:
    """A prompt in one pass, in two chunks, and beside another: the same experts, logits up to rounding."""
    one, two = (PAIRS.encode(chat(text)) for text in ("How many ducks are there?", "2 + 2"))
    blocks, others = [3, 7, 9, 11], [1, 2, 4, 5]
    whole = MODEL.step([RequestRows(one, 0, blocks, True)])
    first = MODEL.step([RequestRows(one[:5], 0, [20, 21, 22, 23], False), RequestRows(two, 0, others, True)])
    rest = MODEL.step([RequestRows(one[5:], 5, [20, 21, 22, 23], True)])
    assert first.logits.shape == (1, MODEL.vocab_size)
    np.testing.assert_allclose(rest.logits, whole.logits, atol=1e-4)
    np.testing.assert_array_equal(
        np.sort(np.concatenate([first.expert_ids[:5], rest.expert_ids]), -1), np.sort(whole.expert_ids, -1)
    )


def test_kv_travels_and_what_does_not_fit_is_refused() -> None:
    prompt = PAIRS.encode(chat("Name three rivers of Europe."))
    ids = MODEL.step([RequestRows(prompt, 0, [30, 31, 32], True)]).expert_ids
    sent = Prefilled(MODEL.identity, np.asarray(prompt, np.int32), ids, MODEL.store.pack([30, 31, 32], len(prompt)))
    got = CODEC.from_bytes(CODEC.to_bytes(sent))
    assert got.identity == sent.identity
    for name in ("keys", "values"):
        np.testing.assert_array_equal(got.tensors[name], sent.tensors[name])
    MODEL.store.check(got.tensors, len(prompt))
    with pytest.raises(ConfigError, match="this worker keeps"):
        MODEL.store.check(got.tensors, len(prompt) + 1)
    with pytest.raises(InputError, match="no prefilled request"):
        CODEC.from_bytes(CODEC.to_bytes(sent)[:-3])
    with pytest.raises(InputError, match="no prefilled request"):
        CODEC.from_bytes(b"")


@pytest.mark.torch
def test_the_tokenizer_is_the_librarys() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.Tokenizer.from_file(str(tiny_model_path() / "tokenizer.json"))
    texts = [chat(prompt.prompt) for prompt in load_prompts()]
    texts += ["", " ", "a  b\n\n c\t", "it's we'll 12.5² Ⅷ ½", "naïve_café __init__", "\u00a0x", "👩‍👩‍👧 क्षि"]
    for text in texts:
        assert PAIRS.encode(text) == theirs.encode(text, add_special_tokens=False).ids, text


@pytest.mark.torch
def test_steps_are_those_of_torch() -> None:
    pytest.importorskip("torch")
    from coterie.engines.worker.model import PackedModel

    theirs = PackedModel(tiny_model_path(), "float32", "cpu", 64, 16)
    texts = [chat(prompt.prompt) for prompt in load_prompts()[::80]][:4]
    prompts = [PAIRS.encode(text)[:100] for text in texts]
    blocks = [list(range(start, start + 8)) for start in range(0, 32, 8)]
    rows = [RequestRows(prompt, 0, mine, True) for prompt, mine in zip(prompts, blocks, strict=True)]
    for step in range(6):
        ours, right = MODEL.step(rows), theirs.step(rows)
        np.testing.assert_allclose(ours.logits, right.logits, atol=1e-3)
        np.testing.assert_array_equal(np.sort(ours.expert_ids, -1), np.sort(right.expert_ids, -1))
        tokens = ours.logits.argmax(axis=1)
        assert (tokens == right.logits.argmax(axis=1)).all()
        rows = [
            RequestRows([int(token)], len(prompt) + step, mine, True)
            for token, prompt, mine in zip(tokens, prompts, blocks, strict=True)
        ]
