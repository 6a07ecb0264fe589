"""The page in a browser, on a live gateway with a real embedded fleet: what is shown, clicked, and typed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from browser import PATIENCE_S, Chromium, Page, chromium, tab
from coterie.answers.demo.serving import keep_busy
from coterie.control.switchback import Comparison, RouterChange
from coterie.gateway.access import new_key
from coterie.gateway.config import ControlSection, GatewayConfig
from coterie.gateway.embedded import EmbeddedFleet, run_embedded
from coterie.net.processes import free_port
from coterie.routing import Decision
from gateway_runs import Run, gateway, run
from http1_peers import until
from shown_control import ShownControl, full_view

LIVE = "document.getElementById('state').dataset.state === 'live'"
ROWS = "document.querySelectorAll('#decisions tbody tr').length"
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\'"&amp;\u202e{{7*7}}'

CLIPPED = """[...document.querySelectorAll('.panel, .panel *')]
    .filter(node => node.clientWidth > 1 && node.scrollWidth > node.clientWidth + 1)
    .filter(node => getComputedStyle(node).display !== 'inline' && !node.closest('svg, thead'))
    .map(node => `${node.tagName}#${node.id}.${node.className}`)"""
"""Elements of panels that do not show all that is in them."""
CONTRAST = """(() => {
    const linear = value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    const light = colour => {
        const [red, green, blue] = colour.match(/[\\d.]+/g).slice(0, 3).map(value => linear(value / 255));
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const ground = light(getComputedStyle(document.querySelector('.panel')).backgroundColor);
    const said = ['p', 'td', 'dt', 'dd', '.chip', 'label'].map(name => `.panel ${name}`).join();
    const shown = [...document.querySelectorAll(said)].filter(node => node.clientHeight);
    return Math.min(...shown.map(node => light(getComputedStyle(node).color))
        .map(text => (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05)));
})()"""
"""Least contrast of a text with its panel, as WCAG counts it."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with chromium(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def fleet(browser: Chromium) -> Iterator[EmbeddedFleet]:  # noqa: ARG001 (no fleet where there is no browser)
    with run_embedded(decoders=2) as found:
        yield found


class Front(NamedTuple):
    """A gateway in front of the fleet, and the loop that all tests run it in."""

    runner: asyncio.Runner
    run: Run
    records: list[Any]
    """Decisions of the requests that it has served."""

    def use(self, test: Coroutine[Any, Any, None]) -> None:
        self.runner.run(asyncio.wait_for(test, PATIENCE_S))


@pytest.fixture(scope="module")
def front(fleet: EmbeddedFleet) -> Iterator[Front]:
    """A gateway that has served a few requests."""
    stack, raised = AsyncExitStack(), list[Any]()

    async def start() -> Run:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
        found = await stack.enter_async_context(gateway(quiet(fleet.config()), access=fleet.access))
        await until(lambda: len(found.open("decode")) == 2 and found.open("prefill"))
        assert await keep_busy(found.running.url, 4) == 4
        found.running.parts.watcher.catch_up()
        return found

    with asyncio.Runner() as runner:
        found = runner.run(asyncio.wait_for(start(), PATIENCE_S))
        yield Front(runner, found, list(found.running.parts.decisions._ring))
        runner.run(stack.aclose())
    assert not raised, raised


def quiet(config: GatewayConfig) -> GatewayConfig:
    """Without a control loop: tests say what one would tell."""
    return msgspec.structs.replace(config, control=ControlSection(enabled=False))


@asynccontextmanager
async def opened(browser: Chromium, front: Front) -> AsyncIterator[tuple[Run, Page]]:
    """The gateway's page, which raises no error."""
    parts = front.run.running.parts
    parts.control = None
    parts.decisions._ring.clear()
    parts.decisions._ring.extend(front.records)
    async with tab(browser) as page:
        await page.open(front.run.running.url + "/")
        await page.until(LIVE)
        await page.until(f"{ROWS} === 8")  # a decision for each pool
        yield front.run, page
        assert page.problems == []


def test_a_live_fleet_is_shown(browser: Chromium, front: Front) -> None:
    async def test() -> None:
        async with opened(browser, front) as (found, page):
            assert (await page.text("#verdict")).startswith("All 3 workers are open and serve")
            assert "Nothing is to be done." in await page.text("#verdict")
            shown = await page.text("#fleet")
            assert all(id in shown for id in ("prefill-0", "decode-0", "decode-1"))
            assert "routed by latency_aware" in shown
            reasons = {one["reason"] for one in found.running.parts.decisions.last(8)}
            decisions = await page.text("#decisions")
            assert all(reason in decisions for reason in reasons)
            assert await page.find("[...document.querySelectorAll('.chip.chosen')].length") == 8
            for chart in (1, 2):
                await page.until(f"document.querySelectorAll('#latency path')[{2 * chart - 1}].getAttribute('d')")
            assert "time to first token" in await page.text("#latency")
            for panel in ("#heat", "#placement", "#events"):
                assert "No control loop runs" in await page.text(panel), panel
            found.running.parts.control = ShownControl(full_view())
            await page.until("document.querySelector('#heat canvas').width === 8")
            assert "0.71 → 0.96" in await page.text("#placement")
            assert await page.find("document.querySelectorAll('#placement rect').length") == 16
            assert "replicate" in await page.text("#placement")
            assert "refit taken" in await page.text("#events")

    front.use(test())


def test_a_comparison_reaches_its_verdict_while_one_watches(browser: Chromium, front: Front) -> None:
    async def test() -> None:
        async with opened(browser, front) as (found, page):
            parts, panel = found.running.parts, "document.getElementById('switchback').innerText"
            assert "are taken: switchback.enabled is false." in await page.text("#switchback")
            parts.comparison = Comparison(
                0.0, "Routers are being compared. Serving under round_robin: 34 of 74 requests."
            )
            await page.until(f"{panel}.includes('round_robin: 34 of 74')")
            assert "round_robin: 34 of 74" in await page.text("#verdict")
            change = RouterChange(13.14, 14.7, -10.6, -14.4, -5.2)
            parts.comparison = Comparison(0.0, "Fewer experts: 10.6%.", {"token_experts": change})
            await page.until(f"{panel}.includes('Fewer experts: 10.6%.')")
            cells = await page.find(
                "[...document.querySelectorAll('#switchback tbody tr > *')].map(one => one.innerText)"
            )
            name = "experts of a layer in a token's step"
            assert cells == [name, "13.1", "14.7", "\u221210.6%", "\u221214.4 to \u22125.2%"]
            parts.comparison = None

    front.use(test())


def test_a_decision_of_another_router_and_a_plan_for_another_fleet_are_named(browser: Chromium, front: Front) -> None:
    async def test() -> None:
        async with opened(browser, front) as (found, page):
            parts = found.running.parts
            assert "by join_shortest_queue" not in await page.text("#decisions")
            parts.decisions._ring.append(parts.decisions._ring[-1]._replace(router="join_shortest_queue"))
            await page.until(
                "document.querySelector('#decisions tbody tr').innerText.includes('by join_shortest_queue: ')"
            )
            parts.control = ShownControl(full_view())
            await page.until("document.getElementById('placement').innerText.includes('there is nothing to apply')")
            parts.config = msgspec.structs.replace(parts.config, control=ControlSection(map="map.json"))
            await page.until("document.getElementById('placement').innerText.includes('set control.apply to true')")
            numbers = await page.find(
                "import('/page/dom.js').then(dom => [1820, 1820000, 1234567.8, 13.14, 0.5].map(one => dom.number(one)))"
            )
            assert numbers == ["1,820", "1,820,000", "1,234,568", "13.1", "0.5"]
            parts.config = msgspec.structs.replace(parts.config, control=ControlSection(enabled=False))

    front.use(test())


def test_every_control_does_what_it_says(browser: Chromium, front: Front) -> None:
    async def choose(page: Page, selector: str, key: str = "ArrowDown") -> None:
        await page.find(f"document.querySelector({selector!r}).focus()")
        await page.press(key)

    async def test() -> None:
        async with opened(browser, front) as (found, page):
            colour = "getComputedStyle(document.body).backgroundColor"
            before = await page.find(colour)
            await page.click("#theme")
            assert await page.find(colour) != before
            assert await page.text("#theme") == "Light"
            await page.open(found.running.url + "/")
            await page.until(LIVE)
            assert await page.text("#theme") == "Light", "the choice is kept"
            await page.click("#theme")
            assert await page.find(colour) == before

            await choose(page, "#decisions-pool")
            await page.until(f"{ROWS} === 4")
            chosen = await page.find("document.getElementById('decisions-pool').value")
            assert chosen in ("decode", "prefill")
            await choose(page, "#decisions-pool", "ArrowUp")
            await page.until(f"{ROWS} === 8")
            await choose(page, "#decisions-worker", "End")
            worker = await page.find("document.getElementById('decisions-worker').value")
            await page.until(
                f"{ROWS} < 8 && [...document.querySelectorAll('#decisions tbody tr')]"
                f".every(row => row.cells[2].textContent === {worker!r})"
            )
            await choose(page, "#decisions-worker", "Home")
            await page.until(f"{ROWS} === 8")

            await page.click("#decisions-pause")
            assert await page.find("document.getElementById('decisions-pause').ariaPressed") == "true"
            decisions = found.running.parts.decisions.recorded + 2
            await keep_busy(found.running.url, 1)
            await page.until(f"document.getElementById('decisions-note').textContent.includes('{decisions} decisions')")
            assert await page.find(ROWS) == 8, "what is shown stays"
            await page.click("#decisions-pause")
            await page.until(f"{ROWS} === 10")

            found.running.parts.control = ShownControl(full_view())
            await page.until("document.querySelector('#heat-worker').options.length === 2")
            await choose(page, "#heat-worker")
            await page.until("document.querySelector('#heat canvas').ariaLabel.includes('decode-1')")
            await choose(page, "#heat-scale")
            assert "logarithmic" in await page.text("#heat .scale")
            await page.hover("#heat canvas", 0.99, 0.99)
            assert (await page.text("#heat-readout")).startswith("Layer 3, expert 7: 31 tokens (14.")
            await choose(page, "#events-kind")
            await page.until("document.querySelectorAll('#events li').length === 2")
            assert "refit taken" not in await page.text("#events ul")

    front.use(test())


def test_the_keyboard_is_enough(browser: Chromium, front: Front) -> None:
    outlined = "getComputedStyle(document.activeElement).outlineStyle"

    async def test() -> None:
        async with opened(browser, front) as (found, page):
            found.running.parts.control = ShownControl(full_view())
            await page.until("document.querySelector('#heat canvas')?.clientHeight")
            order: list[str] = []
            while True:
                await page.press("Tab")
                name = await page.focused()
                if name == "BODY" or name in order[:1]:
                    break  # past the last one: no trap
                order.append(name if name != "scroll" or name not in order else "scroll-2")
                assert await page.find(outlined) != "none", f"{name} does not show that it has the keyboard"
                assert len(order) < 30
            assert order == [
                "skip",
                "theme",
                "heat-worker",
                "heat-scale",
                "CANVAS",
                "decisions-pool",
                "decisions-worker",
                "decisions-pause",
                "scroll",
                "events-kind",
                "scroll-2",
            ]
            await page.find("document.querySelector('#heat canvas').focus()")
            readout = "#heat-readout"
            assert (await page.text(readout)).startswith("Layer 0, expert 0: 0 tokens")
            for key, said in (
                ("ArrowRight", "Layer 0, expert 1"),
                ("ArrowDown", "Layer 1, expert 1"),
                ("End", "Layer 1, expert 7: 15 tokens"),
                ("ArrowRight", "Layer 1, expert 7"),
                ("ArrowUp", "Layer 0, expert 7"),
                ("Home", "Layer 0, expert 0"),
                ("ArrowLeft", "Layer 0, expert 0"),
            ):
                await page.press(key)
                assert (await page.text(readout)).startswith(said), key
            await page.press("Tab", shift=True)
            assert await page.focused() == "heat-scale", "and back"
            await page.find("document.getElementById('decisions-pause').focus()")
            await page.press(" ")
            assert await page.text("#decisions-pause") == "Go on"
            await page.press("Enter")
            assert await page.text("#decisions-pause") == "Pause"
            await page.open(found.running.url + "/?again")
            await page.until(LIVE)
            await page.press("Tab")
            assert await page.focused() == "skip"
            await page.press("Enter")
            await page.until("location.hash === '#main'")
            await page.press("Tab")
            assert await page.focused() in ("heat-worker", "heat-scale", "decisions-pool"), "the header was skipped"

    front.use(test())


def test_it_is_readable_wide_and_narrow_in_light_and_dark(browser: Chromium, front: Front) -> None:
    async def test() -> None:
        async with opened(browser, front) as (found, page):
            found.running.parts.control = ShownControl(full_view(text="w" * 290, items=6))
            await page.until("document.querySelectorAll('#events li').length === 6")
            for width in (1280, 390):
                await page.resize(width)
                for scheme in ("light", "dark"):
                    await page.prefer(scheme)
                    await page.until(
                        f"innerWidth === {width} && matchMedia('(prefers-color-scheme: {scheme})').matches"
                    )
                    assert await page.find("document.documentElement.scrollWidth") == width, "no scrolling sideways"
                    assert await page.find(CLIPPED) == [], (width, scheme)
                    assert await page.find(CONTRAST) >= 4.5, (width, scheme)

    front.use(test())


def test_hostile_strings_stay_text(browser: Chromium, front: Front, fleet: EmbeddedFleet) -> None:
    async def test() -> None:
        async with opened(browser, front) as (found, page):
            parts = found.running.parts
            entry = {"id": "<b onmouseover=alert(1)>x</b>", "url": fleet.workers[-1].url, "role": "decode"}
            assert (await found.client.ask("POST", "/workers", entry)).status == 200
            parts.control = ShownControl(full_view(text=HOSTILE, workers=(HOSTILE,)))
            known = parts.decisions._ring[-1]
            said = Decision(known.decision.worker, known.decision.scores, HOSTILE)
            parts.decisions._ring.append(known._replace(id=HOSTILE, decision=said, fallback=HOSTILE))
            places = ("#placement", "#events", "#decisions", "#heat-worker")
            for place in places:
                await page.until(f"document.querySelector({place!r}).textContent.includes('<img src=x onerror=')")
            await page.until("document.querySelector('#fleet').textContent.includes('<b onmouseover=alert(1)>')")
            await page.hover("#fleet tbody:first-of-type tr:last-child th")
            assert await page.find("typeof window.hacked") == "undefined"
            assert await page.find("document.querySelectorAll('main img, main script, main b').length") == 0
            assert await page.find("document.querySelectorAll('script').length") == 1
            parts.control = None
            parts.remove_worker(entry["id"])

    front.use(test())


def test_lists_do_not_grow(browser: Chromium, front: Front) -> None:
    async def test() -> None:
        async with opened(browser, front) as (found, page):
            parts = found.running.parts
            parts.control = ShownControl(full_view(items=60))
            for number in range(40):
                record = parts.decisions._ring[number % 8]
                parts.decisions._ring.append(record._replace(id=f"again-{number}"))
            await page.until(f"{ROWS} === 30")
            await page.until("document.querySelectorAll('#events li').length === 50")
            count = "document.querySelectorAll('*').length"
            nodes = await page.find(count)
            for number in range(3):
                parts.decisions._ring.append(parts.decisions._ring[0]._replace(id=f"newest-{number}"))
                parts.control.shown = full_view(text=f"view {number}", items=60)
                await page.until(f"document.querySelector('#decisions').textContent.includes('newest-{number}')")
                await page.until(f"document.querySelector('#events').textContent.includes('view {number}')")
            assert await page.find(count) <= nodes + 4, "a row has as many chips as its pool has workers"
            await until(lambda: found.running.gateway.live.listeners == 1)
        await until(lambda: not found.running.gateway.live.listeners)

    front.use(test())


def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Chromium, fleet: EmbeddedFleet, tmp_path: Path) -> None:
    async def test() -> None:
        made = {name: new_key(name, admin=name == "admin") for name in ("team", "admin")}
        file = tmp_path / "keys.yaml"
        file.write_text("".join(one.entry.as_yaml() for one in made.values()))
        file.chmod(0o600)
        config = msgspec.structs.replace(quiet(fleet.config()), keys=str(file))
        async with gateway(config, access=fleet.access) as found, tab(browser) as page:
            await page.open(found.running.url + "/")
            await page.until("!document.getElementById('key-form').hidden")
            assert await page.focused() == "key"
            for key, said in (("two words", "no spaces"), ("wrong", "not known"), (made["team"].key, "administrator")):
                await page.type(key)
                await page.press("Enter")
                await page.until(f"document.getElementById('key-note').textContent.includes({said!r})")
            await page.click("#key")
            await page.type(made["admin"].key)
            await page.click("#key-form button")
            await page.until(LIVE)
            assert await page.find("document.getElementById('key-form').hidden")
            await page.open(found.running.url + "/?again")
            await page.until(LIVE)
            assert made["admin"].key not in await page.find("location.href + document.cookie + document.body.innerHTML")
            assert all("401" in one or "403" in one for one in page.problems), page.problems

    run(test, PATIENCE_S)


def test_another_page_cannot_read_it(browser: Chromium, front: Front) -> None:
    async def test() -> None:
        async with tab(browser) as page:
            found = front.run
            rejected = 'coterie_gateway_rejected_total{reason="key"}'
            before, computed = found.metrics.get(rejected, 0), found.running.gateway.live.computed
            for number, mode in enumerate(("cors", "no-cors"), 1):
                asked = f"fetch('{found.running.url}/live', {{mode: '{mode}'}})"
                got = await page.find(f"{asked}.then(answer => answer.type, error => error.name)")
                assert got in ("TypeError", "opaque"), got
                assert found.metrics[rejected] == before + number
            assert found.running.gateway.live.computed == computed

    front.use(test())


@contextmanager
def gateway_process(config: Path, fleet: EmbeddedFleet) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", "from coterie.cli.main import main; main()", "serve", "--config", str(config)]
    with (config.parent / "gateway.log").open("ab") as log:
        started = subprocess.Popen(command, env={**os.environ, **fleet.access.environment}, stdout=log, stderr=log)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def test_a_dead_gateway_is_shown_as_such(browser: Chromium, fleet: EmbeddedFleet, tmp_path: Path) -> None:
    stale = "document.getElementById('main').classList.contains('stale')"

    async def test() -> None:
        port = free_port()
        url = f"127.0.0.1:{port}"
        config = quiet(fleet.config(url))
        file = tmp_path / "gateway.yaml"
        file.write_bytes(msgspec.json.encode(config))
        async with tab(browser) as page:
            with gateway_process(file, fleet) as process:
                while "errorText" in await page.call("Page.navigate", url=f"http://{url}/"):
                    assert process.poll() is None, (tmp_path / "gateway.log").read_text()
                    await asyncio.sleep(0.1)
                await page.until(LIVE)
                assert not await page.find(stale)
                process.kill()
                await page.until("!document.getElementById('banner').hidden")
                said = await page.text("#banner")
                assert said.startswith("No data: the gateway ")
                assert "What is shown is of " in said
                assert await page.find(stale)
                assert await page.find("document.title") == "No data · Coterie gateway"
                assert "prefill-0" in await page.text("#fleet"), "what was last known stays"
                await page.click("#retry")
                await page.until("!document.getElementById('banner').hidden")
            async with gateway(config, access=fleet.access, port=port):
                await page.until(LIVE)
                assert await page.find("document.getElementById('banner').hidden")
                assert not await page.find(stale)
            assert all("ERR_" in one for one in page.problems), page.problems

    run(test, PATIENCE_S)
