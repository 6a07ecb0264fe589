"""A model's tokenizer and chat template, from the files beside its weights, for the same token ids as its workers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, UnavailableError, check, check_given
from coterie.gateway.signals.messages import NoTokensError, messages_of, template_settings

if TYPE_CHECKING:
    from coterie.gateway.signals.templates import ChatTemplate

Form = Literal["auto", "string"]
Ids = NDArray[np.int64]
"""Token ids of a prompt, [token]; the array is shared and must not be modified."""

OWN_RENDERERS = ("gpt_oss", "deepseek_v32", "deepseek_v4", "deepseek_v41", "kimi_k3", "inkling")
"""Model types whose chats vLLM renders in its own code: ids from a chat template would be similar, not equal."""


class Tokenizer(Protocol):
    """Tokenizer as the token service uses it; must be thread-safe."""

    inexact_chat: str
    """Reason why token ids of chats would differ from the worker's; empty if they are equal."""
    tells_time: bool
    """Whether the token ids of a chat depend on the date."""

    def encode(self, text: str, add_special_tokens: bool = True) -> Ids: ...

    def chat(self, body: Mapping[str, Any]) -> Ids:
        """Return the token ids of a chat body; raise NoTokensError if they cannot be known."""


class FolderTokenizer:
    """A model's own tokenizer and chat templates, from the files beside its weights.

    Special tokens at the ends are those of ``tokenizer.json``, as in transformers 5, which ignores `add_bos_token` in
    ``tokenizer_config.json``. `form` is the form of content that the template gets: *auto* as in vLLM, a list of parts
    if the template iterates over them, else a text; *string* always a text, as in Coterie's own worker. `separator`
    joins parts to a text.
    """

    def __init__(self, folder: str | Path, form: Form = "auto", separator: str = "\n") -> None:
        try:
            import tokenizers
        except ImportError:
            raise UnavailableError(
                "tokenizers is not installed: pip install 'coterie[gateway]' for token ids and prefix hits"
            ) from None
        folder = Path(folder)
        file = folder / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises bare Exceptions
            raise ConfigError(f"{file} cannot be read as a tokenizer: {error}") from None
        config = _json(folder / "tokenizer_config.json")
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        special = {**_special_tokens(_json(folder / "special_tokens_map.json")), **_special_tokens(config)}
        self._add_tokens(tokenizers, config, special)
        kind = _json(folder / "config.json").get("model_type")
        self.inexact_chat = f"vLLM renders chats of {kind} without a template" if kind in OWN_RENDERERS else ""
        self._template = None if self.inexact_chat else _template(folder, config, special, form, separator)
        self.inexact_chat = self.inexact_chat or ("the model has no chat template" if self._template is None else "")
        self.tells_time = self._template is not None and self._template.tells_time

    def encode(self, text: str, add_special_tokens: bool = True) -> Ids:
        return np.array(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids, np.int64)

    def chat(self, body: Mapping[str, Any]) -> Ids:
        template = check_given(self._template, self.inexact_chat, NoTokensError)
        # The template writes the special tokens itself.
        return self.encode(template.render(body), body.get("add_special_tokens") is True)

    def _add_tokens(self, library: Any, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
        """Add the tokens that the config lists and ``tokenizer.json`` lacks, in the order of ids."""
        known = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        listed = config.get("added_tokens_decoder") or {}
        lists = [_texts(config.get(name)) for name in ("additional_special_tokens", "extra_special_tokens")]
        more = itertools.chain(special.values(), *lists)
        try:
            rows = [about for _, about in sorted(listed.items(), key=lambda row: int(row[0]))]
            tokens = [library.AddedToken(**{k: v for k, v in about.items() if k != "__type"}) for about in rows]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"tokenizer_config.json: added_tokens_decoder cannot be read: {error}") from None
        for token in (*tokens, *(library.AddedToken(text, special=True) for text in more)):
            if token.content not in known:
                self._tokenizer.add_tokens([token])
                known.add(token.content)


class TinyTokenizer:
    """coterie-tiny's tokenizer without any library: slower, with the same ids as its NumPy worker."""

    inexact_chat, tells_time = "", False

    def __init__(self, folder: str | Path, separator: str = "\n") -> None:
        from coterie.engines.worker.numpy_model import BytePairs

        self._pairs, self._separator = BytePairs(Path(folder)), separator

    def encode(self, text: str, add_special_tokens: bool = True) -> Ids:
        return np.array(self._pairs.encode(text, add_special_tokens), np.int64)

    def chat(self, body: Mapping[str, Any]) -> Ids:
        settings = template_settings(body)
        check(not settings["continue_final_message"], "continue_final_message needs jinja2", NoTokensError)
        messages = messages_of(body, wrapped=False, separator=self._separator)
        prompt = self._pairs.apply_chat_template(messages, add_generation_prompt=settings["add_generation_prompt"])
        return self.encode(prompt)


def load_tokenizer(folder: str | Path, form: Form = "auto", separator: str = "\n") -> Tokenizer:
    """Load a model folder's tokenizer: :class:`FolderTokenizer`, or without its libraries :class:`TinyTokenizer`.

    Raises UnavailableError or ConfigError, whose text can be the `reason` of a service without a tokenizer.
    """
    try:
        return FolderTokenizer(folder, form, separator)
    except UnavailableError as missing:
        try:
            return TinyTokenizer(folder, separator)
        except (UnavailableError, OSError, ValueError, KeyError, TypeError):
            raise missing from None


def _json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; empty if the file does not exist."""
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    check(isinstance(value, dict), f"{path} must be a JSON object")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the template's variables such as bos_token; a token may be a text or an object with its content."""
    rows = {name: row for name, row in config.items() if name.endswith("_token") and not name.startswith("add_")}
    extra = config.get("extra_special_tokens")
    rows |= extra if isinstance(extra, dict) else {}
    return {name: text for name, row in rows.items() if isinstance(text := _content(row), str)}


def _texts(value: Any) -> list[str]:
    """Return the texts of a list of tokens; an empty list for any other value."""
    rows = value if isinstance(value, list) else []
    return [text for row in rows if isinstance(text := _content(row), str)]


def _content(row: Any) -> Any:
    return row.get("content") if isinstance(row, dict) else row


def _template(
    folder: Path, config: Mapping[str, Any], special: Mapping[str, str], form: Form, separator: str
) -> ChatTemplate | None:
    """Compile the folder's chat templates; files override the config. None if there are none."""
    listed = config.get("chat_template")
    rows = [{"name": "default", "template": listed}] if isinstance(listed, str) else listed
    files = {"default": folder / "chat_template.jinja"} | {
        file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    sources = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()} or {
        row["name"]: row["template"]
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict) and len(row) == 2
    }
    if not sources:
        return None
    try:
        from coterie.gateway.signals.templates import ChatTemplate
    except ImportError:
        raise UnavailableError("jinja2 is not installed: pip install 'coterie[gateway]' for token ids") from None
    return ChatTemplate(sources, special, form, separator)
