"""OpenAI's Python client against a URL. Runs in an environment of its own: ``openai_script.py URL MODEL [KEY]``.

Prints one JSON object: `checks`, each with what was tried and what came of it, and `sent`, ids and bodies of requests
as they left the client, so that they can be compared with what a worker got.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import openai

PROMPT = "The ducks on the pond"
MESSAGES = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "How many ducks are there?"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "How many ducks are there?"}]}]
TOOL = {
    "type": "function",
    "function": {
        "name": "count_ducks",
        "description": "Counts the ducks — all of them, “Ente” and 鴨 too",
        "parameters": {"type": "object", "properties": {"pond": {"type": "string"}}, "required": ["pond"]},
    },
}
TOKENS = 12
AT_ONCE = 8


class Trial:
    """Runs checks in turn; one that raises has failed, and the others go on."""

    def __init__(self, url: str, model: str, key: str) -> None:
        self.model = model
        self.sent: list[tuple[str, str]] = []
        self.checks: list[dict[str, Any]] = []
        hooks = {"request": [self._keep]}
        settings: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": key, "max_retries": 0, "timeout": 120}
        self.client = openai.OpenAI(http_client=openai.DefaultHttpxClient(event_hooks=hooks), **settings)
        self.another = openai.AsyncOpenAI(**settings)

    def _keep(self, request: Any) -> None:
        if "x-request-id" in request.headers:
            self.sent.append((request.headers["x-request-id"], request.content.decode()))

    def check(self, what: str, run: Callable[[], str | None], refusable: str | None = None) -> None:
        """`run` returns a remark, or raises. A worker may refuse a feature: then its error must name `refusable`."""
        try:
            outcome, detail = "passed", run() or ""
        except openai.BadRequestError as error:
            named = refusable is not None and refusable in str(error)
            outcome, detail = ("refused by the worker" if named else "failed"), str(error)
        except Exception as error:
            outcome, detail = "failed", f"{type(error).__name__}: {error}"
        self.checks.append({"what": what, "outcome": outcome, "detail": detail})

    def complete(self, **more: Any) -> Any:
        return self.client.completions.create(
            **{"model": self.model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, **more}
        )

    def chat(self, **more: Any) -> Any:
        body = {"model": self.model, "messages": MESSAGES, "max_completion_tokens": TOKENS, "temperature": 0}
        return self.client.chat.completions.create(**{**body, **more})

    def models(self) -> str:
        names = [one.id for one in self.client.models.list()]
        assert self.model in names, names
        return ", ".join(names)

    def completions(self) -> str:
        whole = self.complete()
        assert whole.usage.completion_tokens > 0, whole.usage
        pieces = list(self.complete(stream=True, stream_options={"include_usage": True}))
        text = "".join(choice.text for piece in pieces for choice in piece.choices)
        assert text == whole.choices[0].text, (text, whole.choices[0].text)
        assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens, pieces[-1]
        return f"{len(pieces)} pieces"

    def chats(self) -> str:
        whole = self.chat()
        pieces = list(self.chat(stream=True))
        text = "".join(choice.delta.content or "" for piece in pieces for choice in piece.choices)
        assert text == whole.choices[0].message.content, (text, whole.choices[0].message.content)
        assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        assert self.chat(messages=PARTS).choices[0].message.content is not None
        return f"{len(pieces)} pieces"

    def streaming_helper(self) -> str:
        with self.client.chat.completions.stream(
            model=self.model, messages=MESSAGES, max_tokens=TOKENS, temperature=0
        ) as stream:
            kinds = {event.type for event in stream}
            found = stream.get_final_completion()
        assert {"chunk", "content.done"} <= kinds, kinds
        return f"finish_reason {found.choices[0].finish_reason}"

    def token_logprobs(self) -> str:
        found = self.complete(logprobs=2, extra_headers={"x-request-id": "completions-logprobs"}).choices[0].logprobs
        assert found.tokens, found
        assert len(found.token_logprobs) == len(found.tokens), found
        return f"{len(found.tokens)} tokens"

    def chat_logprobs(self) -> str:
        asked: dict[str, Any] = {
            "logprobs": True,
            "top_logprobs": 2,
            "extra_headers": {"x-request-id": "chat-logprobs"},
        }
        whole = self.chat(**asked).choices[0].logprobs.content
        pieces = [piece.choices[0] for piece in self.chat(**asked, stream=True) if piece.choices]
        streamed = [one for choice in pieces if choice.logprobs for one in choice.logprobs.content or []]
        assert [one.token for one in streamed] == [one.token for one in whole], (streamed, whole)
        assert all(len(one.top_logprobs) == 2 for one in whole), whole
        return f"{len(whole)} tokens"

    def tools(self) -> str:
        choice = {"type": "function", "function": {"name": "count_ducks"}}
        asked: dict[str, Any] = {"tools": [TOOL], "tool_choice": choice, "max_completion_tokens": 64}
        whole = self.chat(**asked, extra_headers={"x-request-id": "tools"}).choices[0].message.tool_calls
        assert whole[0].function.name == "count_ducks", whole
        pieces = [piece.choices[0].delta for piece in self.chat(**asked, stream=True) if piece.choices]
        calls = [call for delta in pieces for call in delta.tool_calls or []]
        streamed = "".join(call.function.arguments or "" for call in calls)
        assert streamed == whole[0].function.arguments, (streamed, whole[0].function.arguments)
        return f"arguments {streamed[:40]!r}"

    def unknown_fields(self) -> None:
        """Fields that the client does not know reach the worker unchanged."""
        more = {"top_k": 1, "repetition_penalty": 1.0, "ignore_eos": True, "metadata": {"ünïcode": [1.5, None, 1e-7]}}
        self.complete(extra_body=more, stop=["\n\n\n"], seed=7, extra_headers={"x-request-id": "unknown-fields"})

    def several(self) -> str:
        found = self.complete(n=2, temperature=1)
        assert [choice.index for choice in found.choices] == [0, 1], found
        return "2 choices"

    def request_id(self) -> None:
        raw = self.client.completions.with_raw_response.create(
            model=self.model, prompt=PROMPT, max_tokens=1, extra_headers={"x-request-id": "mine-1"}
        )
        assert raw.headers["x-request-id"] == "mine-1", raw.headers
        assert raw.parse()._request_id == "mine-1"

    def errors(self) -> str:
        try:
            self.chat(messages="none")
        except openai.BadRequestError as error:
            said = error.body["message"] if isinstance(error.body, dict) else str(error.body)
        else:
            raise AssertionError("messages that are a text were served")
        try:
            self.client.get("/nothing-here", cast_to=object)
        except openai.NotFoundError:
            return str(said)[:60]
        raise AssertionError("an unknown path was served")

    def left_early(self) -> None:
        stream = self.complete(stream=True, max_tokens=64)
        next(iter(stream))
        stream.close()
        self.complete(max_tokens=1)

    def at_once(self) -> str:
        async def run() -> set[str]:
            async with self.another as client:
                asked = {"model": self.model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
                found = await asyncio.gather(*(client.completions.create(**asked) for _ in range(AT_ONCE)))
            return {one.choices[0].text for one in found}

        texts = asyncio.run(run())
        assert len(texts) == 1, texts
        return f"{AT_ONCE} requests, one text"


def main() -> None:
    url, model, *rest = sys.argv[1:]
    trial = Trial(url, model, rest[0] if rest else "none")
    trial.check("models", trial.models)
    trial.check("completions, whole and streamed", trial.completions)
    trial.check("chat, whole and streamed", trial.chats)
    trial.check("chat by the streaming helper", trial.streaming_helper)
    trial.check("completions with logprobs", trial.token_logprobs, "logprobs")
    trial.check("chat with logprobs, whole and streamed", trial.chat_logprobs, "logprobs")
    trial.check("tools, whole and streamed", trial.tools, "tool")
    trial.check("fields that the client does not know", trial.unknown_fields, "is not supported")
    trial.check("n=2", trial.several, "n=2")
    trial.check("X-Request-Id", trial.request_id)
    trial.check("errors become the client's exceptions", trial.errors)
    trial.check("a stream left early, then another request", trial.left_early)
    trial.check("asyncio client", trial.at_once)
    json.dump({"version": openai.__version__, "checks": trial.checks, "sent": trial.sent}, sys.stdout)


if __name__ == "__main__":
    main()
