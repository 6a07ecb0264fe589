"""Record a trace from a running SGLang server without interrupting it.

    mode       required server option                   records
    routed     --enable-return-routed-experts           the prompts that this recorder sends: every token's experts
    recorder   --expert-distribution-recorder-mode M    a load table of all requests that the server runs meanwhile

Without a mode, the first one that the server supports is used; without prompts, only `recorder` is possible. The
recorder writes its dump on the *server's* machine, so that folder must be reachable from this machine.

The server's settings are checked first: in some SGLang versions, starting a recorder that was not configured raises
inside the scheduler and stops serving for all clients.

With per_pass and per_token every rank writes its own dump of the recorder. Counts of ranks are summed.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import ExitStack, aclosing, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.engines.recording import FLUSH_S, Sending, check_listening
from coterie.engines.torch_files import read_rank_dumps
from coterie.errors import ConfigError, InputError, UnavailableError, UnknownNameError, check
from coterie.models import get_model, model_from_config
from coterie.net.http_client import Client, HttpResult, Tally, completion_body, completion_path, server_url
from coterie.prompts import Prompt
from coterie.traces import (
    Activations,
    ActivationTrace,
    ActivationWriter,
    LoadTable,
    RequestTrace,
    TraceMeta,
    check_new_folder,
)
from coterie.traces.readers.base import ReadOptions
from coterie.types import DECODE, PREFILL, ModelSpec
from coterie.wire.routed_experts import NotReturnedError, RoutedAnswer, parse_sglang_answer

Mode = Literal["routed", "recorder"]

DUMP_DIR = "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"
"""Environment variable with SGLang's dump folder; the default is /tmp."""


class SGLangRecording(NamedTuple):
    """A finished recording."""

    trace: ActivationTrace | LoadTable
    """Activations, or the load table of the server's recorder."""
    tally: Tally
    """Outcomes of the requests that were sent."""


def record_sglang(
    url: str,
    out: str | Path,
    sending: Sending,
    *,
    mode: Mode | None = None,
    dump_dir: str | Path | None = None,
    model: str | None = None,
) -> SGLangRecording:
    """Write the trace `out` (a new folder). `model` names the shape if the server's model is not a shipped one."""
    check(
        sending.prompts or sending.duration_s is not None,
        "give prompts to send, or for how long to listen (--prompts, --duration)",
    )
    folder = check_new_folder(out)
    check_listening(server_url(url), "start it, such as python -m sglang.launch_server --enable-return-routed-experts")
    return asyncio.run(_record(url, folder, sending, model, mode, None if dump_dir is None else Path(dump_dir)))


def _send(sending: Sending, client: Client, served: str, **more: Any) -> AsyncGenerator[HttpResult, None]:
    """Send the prompts and return the answers in order of arrival."""
    most, prompts = sending.max_tokens, sending.prompts
    if sending.chat:
        return sending.send(
            client, completion_path(chat=True), (completion_body(p, served, most, True, **more) for p in prompts)
        )
    more["sampling_params"] = {"temperature": 0.0, "max_new_tokens": most}
    return sending.send(client, "/generate", ({"text": p.prompt, **more} for p in prompts))


async def _record(
    url: str, out: Path, sending: Sending, model: str | None, mode: Mode | None, dump_dir: Path | None
) -> SGLangRecording:
    async with Client(url) as client:
        sending.report("Asking the server", 0, 1)
        info = await _server_info(client)
        if (mode or _choose(client.url, info, bool(sending.prompts))) == "routed":
            return await _routed(client, info, out, sending, model)
        return await _recorder(client, info, out, sending, model, dump_dir)


async def _server_info(client: Client) -> dict[str, Any]:
    """Return the server's settings; older versions serve them at another path."""
    for path in ("/server_info", "/get_server_info"):
        status, text = await client.call("GET", path)
        if status == 404:
            continue
        with suppress(ValueError, RecursionError):
            info = json.loads(text) if status == 200 else None
            if isinstance(info, dict):
                return info
        raise UnavailableError(f"{client.url}{path} answers HTTP {status}: {' '.join(text[:200].split())}")
    raise ConfigError(f"{client.url} has neither /server_info nor /get_server_info: is it an SGLang server?")


def _choose(url: str, info: Mapping[str, Any], prompts: bool) -> Mode:
    if prompts and info.get("enable_return_routed_experts", True):
        return "routed"
    if info.get("expert_distribution_recorder_mode"):
        return "recorder"
    wanted = "--enable-return-routed-experts or " if prompts else ""
    raise ConfigError(f"{url} records nothing: start it with {wanted}--expert-distribution-recorder-mode stat")


def _spec(info: Mapping[str, Any], model: str | None) -> ModelSpec:
    """Look up the model by the given name, else by the server's; a folder with a config.json is read."""
    name = model or str(info.get("model_path") or "")
    if (Path(name) / "config.json").is_file() or (name.endswith(".json") and Path(name).is_file()):
        return model_from_config(name)
    try:
        return get_model(name)
    except UnknownNameError as error:
        if model is not None:
            raise
        raise ConfigError(
            f"the server's model {name!r} has no known shape, which its answers do not carry: name it with model=, "
            "or give a folder with its config.json"
        ) from error


# ------------------------------------------------------------------------------------------------------------- routed


async def _routed(
    client: Client, info: Mapping[str, Any], out: Path, sending: Sending, model: str | None
) -> SGLangRecording:
    check(sending.prompts, "mode 'routed' records the requests it sends: give prompts")
    check(
        info.get("enable_return_routed_experts") is not False,
        f"{client.url} returns no experts: start it with --enable-return-routed-experts",
    )
    spec, tally = _spec(info, model), Tally()
    served = str(info.get("served_model_name") or info.get("model_path") or spec.name)
    # Versions that cannot list token ids ignore these fields; /generate always lists the output's.
    more = {"return_routed_experts": True, "return_prompt_token_ids": True}
    more |= {"return_token_ids": True} if sending.chat else {}
    with ExitStack() as stack:
        rows = _InOrder(out, sending, _meta(spec, info, sending), stack, tally)
        async with aclosing(_send(sending, client, served, **more)) as answers:
            async for answer in answers:
                try:
                    rows.take(answer, _parsed(answer, spec))
                except NotReturnedError:
                    raise ConfigError(
                        f"{client.url} answers without routed_experts: start it with --enable-return-routed-experts, "
                        "and name the server itself, as a router in between may drop them"
                    ) from None
    check(rows.writer is not None, f"{client.url}: nothing was recorded: {tally.summary}", UnavailableError)
    return SGLangRecording(ActivationTrace.open(out), tally)


def _parsed(answer: HttpResult, spec: ModelSpec) -> RoutedAnswer | str:
    if answer.body is None:
        return answer.problem or "it was not answered"
    try:
        return parse_answer(answer.body, spec)
    except InputError as error:
        if isinstance(error, NotReturnedError):
            raise
        return f"the answer {error}"


def _meta(spec: ModelSpec, info: Mapping[str, Any], sending: Sending) -> TraceMeta:
    return TraceMeta(
        model=spec.name,
        num_experts=spec.num_experts,
        num_layers=spec.num_moe_layers,
        top_k=spec.top_k,
        layer_ids=spec.moe_layer_ids,
        source={
            "engine": "sglang",
            "version": str(info.get("version", "unknown")),
            "mode": "routed",
            "prompts": len(sending.prompts),
            "max_tokens": sending.max_tokens,
            "chat": sending.chat,
        },
    )


class _InOrder:
    """Write requests to the trace in the order they were sent; answers arrive in another order.

    The trace is created with the first request to write, so that a failed run leaves no folder behind.
    """

    def __init__(self, out: Path, sending: Sending, meta: TraceMeta, stack: ExitStack, tally: Tally) -> None:
        self.out, self.prompts, self.meta, self.stack, self.tally = out, sending.prompts, meta, stack, tally
        self.writer: ActivationWriter | None = None
        self.with_domains = any(prompt.domain for prompt in sending.prompts)
        self.with_tokens = False
        self.next = 0
        self.waiting: dict[int, tuple[float, RoutedAnswer | str]] = {}
        self.flushed = time.monotonic()

    def take(self, answer: HttpResult, parsed: RoutedAnswer | str) -> None:
        self.waiting[answer.number] = answer.sent_s, parsed
        while self.next in self.waiting:
            sent_s, row = self.waiting.pop(self.next)
            problem = row if isinstance(row, str) else self._write(self.prompts[self.next], sent_s, row)
            if problem is None:
                self.tally.done += 1
            else:
                self.tally.problems[problem] += 1
            self.next += 1
        if self.writer is not None and time.monotonic() - self.flushed > FLUSH_S:
            self.writer.flush()
            self.flushed = time.monotonic()

    def _write(self, prompt: Prompt, sent_s: float, row: RoutedAnswer) -> str | None:
        """Write one request; return the reason if it cannot be written."""
        if self.writer is None:
            self.with_tokens = row.token_ids is not None
            self.writer = self.stack.enter_context(ActivationWriter(self.out, self.meta))
        if self.with_tokens and row.token_ids is None:
            return "the answer lists no token ids, unlike the first"
        phase = np.repeat([PREFILL, DECODE], [row.prompt_tokens, row.output_tokens - 1]).astype(np.uint8)
        table = RequestTrace(
            prompt_tokens=np.array([row.prompt_tokens]),
            output_tokens=np.array([row.output_tokens]),
            arrival_s=np.array([sent_s]),
            ids=[prompt.id],
            domains=[prompt.domain or "unknown"] if self.with_domains else None,
        )
        tokens = Activations(row.expert_ids, phase, row.token_ids if self.with_tokens else None)  # type: ignore[arg-type]
        self.writer.append_many(tokens, np.array([0, len(phase)]), table)
        return None


# ----------------------------------------------------------------------------------------------------------- recorder


async def _recorder(
    client: Client, info: Mapping[str, Any], out: Path, sending: Sending, model: str | None, dump_dir: Path | None
) -> SGLangRecording:
    check(
        info.get("expert_distribution_recorder_mode"),
        f"{client.url} has no recorder: start it with --expert-distribution-recorder-mode stat",
    )
    folder = dump_dir or Path(os.environ.get(DUMP_DIR) or tempfile.gettempdir())
    check(folder.is_dir(), f"dump_dir={str(folder)!r} is no folder here; give the one the server has in {DUMP_DIR}")
    before, tally = dumps_in(folder), Tally()
    await _control(client, "start")
    try:
        await _meanwhile(client, info, sending, tally)
    finally:  # stop the server's recorder even if this recording is interrupted
        await _control(client, "stop")
    sending.report("Waiting for the dump", 0, 1)
    await _control(client, "dump")
    files = await new_dumps(folder, before)
    check(
        files,
        f"no new dump appeared in {folder} within {DUMP_WAIT_S:g} s: give the folder the server has in {DUMP_DIR} "
        "(/tmp without it)",
        UnavailableError,
    )
    name = model or str(info.get("model_path") or "unknown")
    trace = read_rank_dumps(folder, files, ReadOptions(model=name.rstrip("/").rsplit("/", 1)[-1]))
    trace.save(out)
    return SGLangRecording(trace, tally)


async def _control(client: Client, action: str) -> None:
    status, text = await client.call("POST", f"/{action}_expert_distribution_record")
    if status != 200:
        reason = " ".join(text[:200].split())
        raise UnavailableError(f"{client.url} does not {action} its recorder: HTTP {status}: {reason}")


async def _meanwhile(client: Client, info: Mapping[str, Any], sending: Sending, tally: Tally) -> None:
    begun = time.monotonic()
    if not sending.prompts:
        duration_s = sending.duration_s or 0.0
        while (passed := time.monotonic() - begun) < duration_s:
            sending.report("Listening, seconds", int(passed), int(duration_s))
            await asyncio.sleep(min(0.5, duration_s - passed))
        return
    served = str(info.get("served_model_name") or info.get("model_path") or "default")
    async with aclosing(_send(sending, client, served)) as answers:
        async for answer in answers:
            tally.note(answer)
    check(tally.done, f"{client.url}: nothing was recorded: {tally.summary}", UnavailableError)


def parse_answer(body: Mapping[str, Any], spec: ModelSpec) -> RoutedAnswer:
    """Parse one answer, with the expert ids of the MoE layers only; any malformed answer raises InputError."""
    answer = parse_sglang_answer(body, spec)
    ids = answer.expert_ids
    if ids.shape[1] == spec.num_layers:
        ids = ids[:, list(spec.moe_layer_ids)]
    _check_rows(ids, spec)
    return answer._replace(expert_ids=ids)


def _check_rows(ids: NDArray[np.integer], spec: ModelSpec) -> None:
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < spec.num_experts:
        raise InputError(f"routed_experts from {ids.min()} to {ids.max()}; {spec.name} has {spec.num_experts} experts")
    if spec.top_k > 1 and ids.size:  # a router picks k different experts: a row of zeros was not captured
        empty = np.argwhere((ids == 0).all(axis=2))
        if empty.size:
            token, layer = int(empty[0][0]), spec.moe_layer_ids[int(empty[0][1])]
            raise InputError(
                f"routed_experts of token {token}, layer {layer} is all zero: it was not captured. SGLang captures "
                "nothing with the MoE runner triton_kernel, gpt-oss's default on Hopper: start it with "
                "--moe-runner-backend triton, which takes bf16 weights"
            )


SETTLE_S, DUMP_WAIT_S = 1.0, 60.0
"""A dump is complete when no file has grown for `SETTLE_S` seconds; waiting ends after `DUMP_WAIT_S` seconds."""


def dumps_in(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in folder.glob("expert_distribution_recorder_*.pt")}


async def new_dumps(folder: Path, before: Mapping[Path, int]) -> list[Path]:
    """Wait until the new dump files stop growing and return them; `before` are the old files."""
    seen: dict[Path, int] = {}
    changed = begun = time.monotonic()
    while time.monotonic() - begun < DUMP_WAIT_S:
        now = {path: size for path, size in dumps_in(folder).items() if path not in before}
        if now != seen:
            seen, changed = now, time.monotonic()
        elif now and time.monotonic() - changed >= SETTLE_S:
            break
        await asyncio.sleep(0.1)
    return sorted(seen)
