"""Chromium without a window, driven over its DevTools protocol: real clicks and keys, and what the page then shows.

The browser is a process that several tests share; each page is of one test, in a profile of its own.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

PATIENCE_S = 300.0
"""No verdict depends on it: it ends a test that hangs."""
NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--mute-audio",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
)
KEYS = {
    "Tab": ("Tab", 9, ""),
    "Enter": ("Enter", 13, "\r"),
    " ": ("Space", 32, " "),
    "Home": ("Home", 36, ""),
    "End": ("End", 35, ""),
    "ArrowLeft": ("ArrowLeft", 37, ""),
    "ArrowUp": ("ArrowUp", 38, ""),
    "ArrowRight": ("ArrowRight", 39, ""),
    "ArrowDown": ("ArrowDown", 40, ""),
    "PageDown": ("PageDown", 34, ""),
}
"""Key → code, number of Windows, text."""


def find_chromium() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Chromium(NamedTuple):
    """A running browser."""

    process: subprocess.Popen[bytes]
    url: str
    """URL of its DevTools WebSocket."""


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Chromium]:
    """Start a browser with its profile in `folder`; skips the test where there is none."""
    program = find_chromium()
    if program is None:
        pytest.skip(f"no Chromium found (looked for {', '.join(NAMES)}): the page is not tested in a browser here")
    with (folder / "chromium.log").open("wb") as log:
        command = [program, *OPTIONS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        file, until = folder / "profile" / "DevToolsActivePort", time.monotonic() + PATIENCE_S
        while not (file.exists() and file.read_text().count("\n")):
            if process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"{program} does not start: {(folder / 'chromium.log').read_text()[-2000:]}")
            time.sleep(0.02)
        port, path = file.read_text().split()
        yield Chromium(process, f"ws://127.0.0.1:{port}{path}")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Devtools:
    """A connection to a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.pages: dict[str, Page] = {}
        self._reader = asyncio.create_task(self._read())

    async def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        answered = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json(message)
        async with asyncio.timeout(PATIENCE_S):
            told = await answered
        if "error" in told:
            raise AssertionError(f"{method}: {told['error']}")
        found: dict[str, Any] = told["result"]
        return found

    async def _read(self) -> None:
        async for message in self._socket:
            told = message.json()
            if "id" in told:
                self._waiting.pop(told["id"]).set_result(told)
            elif told.get("sessionId") in self.pages:
                self.pages[told["sessionId"]].note(told["method"], told["params"])
        for one in self._waiting.values():
            one.cancel()

    async def close(self) -> None:
        await self._socket.close()
        await self._reader


class Page:
    """A tab: what a person does, and what the page shows."""

    def __init__(self, devtools: Devtools, session: str) -> None:
        self._devtools, self._session = devtools, session
        self.problems: list[str] = []
        """Errors that the page raised or logged."""

    def note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            told = params["exceptionDetails"]
            self.problems.append(f"{told['text']} {told.get('exception', {}).get('description', '')}")
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str([one.get("value") for one in params["args"]]))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._devtools.call(method, self._session, **params)

    async def resize(self, width: int, height: int = 900) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    async def prefer(self, scheme: str) -> None:
        """The colours that the machine is set to: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def open(self, url: str) -> None:
        told = await self.call("Page.navigate", url=url)
        assert "errorText" not in told, told
        await self.until("document.readyState === 'complete'")

    async def find(self, expression: str, strict: bool = True) -> Any:
        """Value of an expression in the page; None if it raises and is not `strict`."""
        told = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert not strict or "exceptionDetails" not in told, (expression, told["exceptionDetails"])
        return None if "exceptionDetails" in told else told["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until an expression holds; return its value. It may raise meanwhile, as while a page is loaded."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not (found := await self.find(expression, strict=False)):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            shown = await self.find("document.body.innerText")
            raise AssertionError(f"never true: {expression}; the page shows: {shown[:3000]}") from None
        return found

    async def text(self, selector: str) -> str:
        return str(await self.find(f"document.querySelector({selector!r}).innerText"))

    async def point(self, selector: str, x: float = 0.5, y: float = 0.5) -> tuple[float, float]:
        """Scroll an element into view; a place in it, as shares of its width and height."""
        box = await self.find(
            f"(() => {{const node = document.querySelector({selector!r}); node.scrollIntoView({{block: 'center'}});"
            "const box = node.getBoundingClientRect(); return [box.x, box.y, box.width, box.height];})()"
        )
        assert box[2] > 0, f"{selector} is not shown"
        assert box[3] > 0, f"{selector} is not shown"
        return box[0] + x * box[2], box[1] + y * box[3]

    async def hover(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        at = await self.point(selector, x, y)
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])

    async def click(self, selector: str) -> None:
        """Press and release the mouse in the middle of an element, which must be on top there."""
        x, y = await self.point(selector)
        top = f"document.querySelector({selector!r}).contains(document.elementFromPoint({x}, {y}))"
        assert await self.find(top), f"something lies over {selector}"
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def press(self, key: str, shift: bool = False) -> None:
        code, number, said = KEYS[key]
        told = {"key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": 8 if shift else 0}
        await self.call("Input.dispatchKeyEvent", type="keyDown" if said else "rawKeyDown", text=said, **told)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **told)

    async def type(self, said: str) -> None:
        await self.call("Input.insertText", text=said)

    async def focused(self) -> str:
        """Id, else class, else tag of what has the keyboard."""
        named = "(n => n.id || n.className || n.tagName)(document.activeElement ?? document.body)"
        return str(await self.find(named))

    async def screenshot(self, path: Path) -> None:
        """The whole page, beyond what fits into the window."""
        size = await self.find("[document.documentElement.clientWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
        told = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(told["data"]))

    async def memory(self) -> tuple[int, int]:
        """Bytes of the JavaScript heap and number of DOM nodes, after a collection of garbage."""
        await self.call("HeapProfiler.collectGarbage")
        heap = await self.call("Runtime.getHeapUsage")
        return int(heap["usedSize"]), int((await self.call("Memory.getDOMCounters"))["nodes"])


@contextlib.asynccontextmanager
async def tab(browser: Chromium, width: int = 1280, scheme: str = "light") -> AsyncIterator[Page]:
    """A page in a fresh profile; what it left is removed with it."""
    async with aiohttp.ClientSession() as http, http.ws_connect(browser.url, max_msg_size=1 << 28) as socket:
        devtools = Devtools(socket)
        try:
            context = (await devtools.call("Target.createBrowserContext"))["browserContextId"]
            target = await devtools.call("Target.createTarget", url="about:blank", browserContextId=context)
            told = await devtools.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
            page = devtools.pages[told["sessionId"]] = Page(devtools, told["sessionId"])
            for domain in ("Page", "Runtime", "Log", "HeapProfiler"):
                await page.call(f"{domain}.enable")
            await page.call("Emulation.setFocusEmulationEnabled", enabled=True)
            await page.resize(width)
            await page.prefer(scheme)
            yield page
            await devtools.call("Target.disposeBrowserContext", browserContextId=context)
        finally:
            await devtools.close()
