"""Ids against those of transformers and vLLM themselves, for tokenizers and templates of several kinds."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from chat_templates import BODIES, TEMPLATES
from coterie.engines.tiny import tiny_model_path
from coterie.gateway.signals.messages import NoTokensError
from coterie.gateway.signals.model_tokenizers import FolderTokenizer

TEXTS = [
    "",
    " ",
    "plain words, 12345 and 3.14\n\n\ttabs",
    "naïve 日本語 😀 ﬁ é́ \u200b",
    "<|im_start|>user\nspecial <|endoftext|> in text<|im_end|>",
    "word" * 500,
    "<s> </s> <unk>",
]
ENDS: list[dict[str, Any]] = [
    {},
    {"add_bos_token": True},
    {"add_bos_token": True, "add_eos_token": True},
    {"add_bos_token": False, "add_eos_token": None},
    {"extra": "<|brand_new|>"},
    {"additional_special_tokens": ["<|im_start|>", "<|brand_new|>"]},
    {"added_tokens_decoder": {"4096": {"content": "<|brand_new|>", "special": False, "normalized": True}}},
]


def folder_of(root: Path, template: str, **changes: Any) -> Path:
    """coterie-tiny's tokenizer with another template and configuration."""
    folder = root / "model"
    shutil.copytree(tiny_model_path(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    about = json.loads((folder / "tokenizer_config.json").read_text())
    del about["chat_template"]
    about |= {"bos_token": "<|endoftext|>", **changes}
    if "extra" in about:
        about["mask_token"] = about.pop("extra")
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.torch
@pytest.mark.parametrize("changes", ENDS, ids=str)
def test_texts_as_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    folder = folder_of(tmp_path, TEMPLATES["chatml"], **changes)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True), FolderTokenizer(folder)
    for text in (*TEXTS, "a <|brand_new|> one"):
        for ends in (True, False):
            right = theirs(text, add_special_tokens=ends)["input_ids"]
            assert ours.encode(text, ends).tolist() == right, (text, ends)


@pytest.mark.torch
def test_a_sentencepiece_like_tokenizer_as_transformers(tmp_path: Path) -> None:
    """Byte fallback, spaces as ▁, BOS by the file's own post-processor, padding and truncation stored in the file."""
    transformers, library = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    vocab = {token: n for n, token in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))])}
    for text in ("▁", "a", "b", "c", "▁a", "ab", "▁ab", "▁abc", "bc"):
        vocab[text] = len(vocab)
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("b", "c"), ("▁ab", "c")]
    made = library.Tokenizer(library.models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = library.normalizers.Sequence(
        [library.normalizers.Prepend("▁"), library.normalizers.Replace(" ", "▁")]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = library.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    made.enable_truncation(4)
    made.enable_padding(length=16)
    made.save(str(tmp_path / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    theirs, ours = (
        transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True),
        FolderTokenizer(tmp_path),
    )
    for text in (*TEXTS, "abc abc  ab", "<s>abc"):
        for ends in (True, False):
            assert ours.encode(text, ends).tolist() == theirs(text, add_special_tokens=ends)["input_ids"], (text, ends)


@pytest.mark.torch
@pytest.mark.parametrize("template", TEMPLATES)
def test_chats_as_transformers(tmp_path: Path, template: str) -> None:
    """Bodies that need none of vLLM's changes to messages."""
    transformers = pytest.importorskip("transformers")
    folder = folder_of(tmp_path, TEMPLATES[template])
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ours = FolderTokenizer(folder, form="string")
    for name in ("one", "turns", "no prompt", "continued", "settings", "tools", "empty", "long word"):
        body = copy.deepcopy(BODIES[name])
        messages, tools = body.pop("messages"), body.pop("tools", None)
        more = body.pop("chat_template_kwargs", {})
        settings = {"add_generation_prompt": True, **body, **more}
        right = theirs.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False, **settings)
        assert ours.chat(BODIES[name]).tolist() == right, name


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # vLLM's imports
@pytest.mark.parametrize("template", TEMPLATES)
def test_chats_as_vllm(tmp_path: Path, template: str) -> None:
    pytest.importorskip("vllm")
    from vllm.config import ModelConfig
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers.chat_utils import parse_chat_messages
    from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template
    from vllm.renderers.params import merge_kwargs
    from vllm.tokenizers import get_tokenizer

    folder = folder_of(tmp_path, TEMPLATES[template])
    config, tokenizer, ours = ModelConfig(str(folder)), get_tokenizer(str(folder)), FolderTokenizer(folder)
    for name, body in BODIES.items():
        request = ChatCompletionRequest.model_validate({"model": "m", **copy.deepcopy(body)})
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        settings = (
            request.build_chat_params(None, "auto")
            .with_defaults(merge_kwargs(None, {"tools": tools, "tokenize": False}))
            .get_apply_chat_template_kwargs()
        )
        form = resolve_chat_template_content_format(None, settings.get("tools"), "auto", tokenizer, model_config=config)
        messages, *_ = parse_chat_messages(request.messages, config, content_format=form)
        text = safe_apply_chat_template(config, tokenizer, messages, **settings)
        right = tokenizer.encode(text, add_special_tokens=request.add_special_tokens)
        assert ours.chat(body).tolist() == right, name


def test_what_a_template_refuses(tmp_path: Path) -> None:
    ours = FolderTokenizer(folder_of(tmp_path, TEMPLATES["parts"]))
    with pytest.raises(NoTokensError, match="unknown role critic"):
        ours.chat({"messages": [{"role": "critic", "content": "no"}]})
