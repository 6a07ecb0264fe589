"""The demo on a running gateway: request one completion, then compare routers on the gateway's workers."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import NamedTuple

from coterie.answers.demo.run import BASELINES, DemoResult, Report, run_demo
from coterie.answers.demo.telling import telling
from coterie.errors import UnavailableError
from coterie.gateway.embedded import OURS, EmbeddedFleet
from coterie.net.http_client import Client, completion_body, completion_path, served_model
from coterie.prompts import load_prompts

MAX_TOKENS = 24


class FirstCompletion(NamedTuple):
    """Answer to one request that was sent through the gateway."""

    model: str
    prompt: str
    text: str
    seconds: float


def first_completion(url: str) -> FirstCompletion:
    """Request one chat completion from the gateway. Raise UnavailableError if the gateway does not answer."""

    async def ask() -> FirstCompletion:
        async with Client(url) as client:
            model, prompt = await served_model(client), load_prompts()[0]
            started = time.perf_counter()
            answer = await client.post(
                completion_path(chat=True), completion_body(prompt, model, MAX_TOKENS, chat=True)
            )
            seconds = time.perf_counter() - started
        if answer.body is None:
            raise UnavailableError(f"{url} did not answer a completion: {answer.problem}")
        text = answer.body["choices"][0]["message"]["content"]
        return FirstCompletion(model, prompt.prompt, text, seconds)

    return asyncio.run(ask())


def run_on(fleet: EmbeddedFleet, url: str, folder: Path, report: Report | None = None) -> DemoResult:
    """Compare routers on the gateway's own workers, then switch the gateway to the fitted router.

    The gateway's dashboard shows the progress.
    """
    with telling(url, (*BASELINES, OURS), "an H200") as told:

        def progress(what: str, done: int, total: int) -> None:
            told.progress(what, done, total)
            if report is not None:
                report(what, done, total)

        result = run_demo(out=folder, report=progress, served=(fleet, url), rows_so_far=told.rows)
        told.done(result.verdict)
    asyncio.run(_use(url, result.fit))
    return result


async def _use(url: str, fit: str) -> None:
    async with Client(url) as client:
        body = {"router": OURS, "fit": str(Path(fit).resolve()), "model": None}
        status, text = await client.call("PUT", "/routers/decode", body)
    if status != 200:
        raise UnavailableError(f"the gateway did not take the fitted router: {json.loads(text)['error']['message']}")
