"""The web page: what is served, and, where a browser is installed, what a person sees."""

import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from live_server import SMALL_POOL, LiveServer, in_worker, maker, wait_until

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.parametrize(("path", "kind"), [("/", "html"), ("/page.js", "javascript"), ("/page.css", "css")])
def test_page_is_served_and_needs_nothing_from_elsewhere(server: LiveServer, path: str, kind: str) -> None:
    response = server.http.get(path)
    assert response.status_code == 200
    assert kind in response.headers["content-type"]
    assert "default-src 'none'" in response.headers["content-security-policy"]
    urls = re.findall(r"https?://[^\s\"')]+", response.text)
    assert [url for url in urls if not url.startswith("http://www.w3.org/2000/svg")] == []


def test_page_can_be_left_out(folder: Path) -> None:
    with LiveServer(maker(folder), web=False) as server:
        assert server.http.get("/").status_code == 404


@pytest.fixture(scope="module")
def page(folder: Path) -> Iterator[Any]:
    """The page in a headless browser, over a server whose pool is so small that blocks move."""
    if BROWSER is None:
        pytest.skip("no browser: install chromium")
    api = pytest.importorskip("playwright.sync_api", reason="pip install playwright (it drives the installed chromium)")
    with LiveServer(in_worker(folder, **SMALL_POOL)) as server, api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 860})
        page.problems = []
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("console", lambda line: page.problems.append(line.text) if line.type == "error" else None)
        page.server = server
        page.goto(server.url)
        yield page
        browser.close()


def test_chat_streams_and_tiers_are_shown(page: Any) -> None:
    page.wait_for_selector(".state.ready")
    page.click("summary:has-text('Sampling')")
    page.fill("#max_tokens", "40")
    page.fill("#seed", "4")
    page.fill("#prompt", "hello")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".assistant:not(.open) small")
    assert "tokens" in page.inner_text(".assistant small")
    assert page.inner_text(".user") == "hello"
    wait_until(lambda: page.inner_text("#rate") != "–" or page.wait_for_timeout(100))
    tiers = page.inner_text("#tiers")
    assert "GPU" in tiers
    assert "DRAM" in tiers
    assert page.query_selector(".row.gpu .mark") is not None
    assert page.server.status()["num_moves"] > 0
    if path := os.environ.get("AMBIDEX_TEST_SCREENSHOT"):
        page.screenshot(path=path)
    assert page.problems == []


def test_prefix_cache_is_shown(page: Any) -> None:
    page.server.complete("a prompt that comes twice", max_tokens=4).raise_for_status()
    page.server.complete("a prompt that comes twice", max_tokens=4).raise_for_status()
    wait_until(lambda: page.inner_text("#cached") not in ("–", "0") or page.wait_for_timeout(100))
    assert page.inner_text("#cached") == str(page.server.status()["num_cached_tokens"])
    assert "kept" in page.inner_text(".row.gpu .more")
    width = "element => element.getBoundingClientRect().width"
    assert page.eval_on_selector(".row.gpu .kept", width) > 0
    assert page.inner_text("#restarts") == "0"


def test_tiers_move_while_an_answer_is_written(page: Any) -> None:
    shown: set[str] = set()

    def look() -> bool:
        shown.add(page.inner_text(".row.dram span"))
        page.wait_for_timeout(50)
        return len(shown) > 1

    def keep_asking() -> None:
        while not is_over.is_set():
            page.server.complete("x" * 60, max_tokens=60, ignore_eos=True)

    is_over = threading.Event()
    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        wait_until(look)
    finally:
        is_over.set()
        asking.join()


def test_stop_ends_the_answer_and_keeps_what_came(page: Any) -> None:
    page.click("#clear")
    before = page.server.app.metrics.text(None).count(b'reason="gone"')
    page.evaluate("window.held = fetch; window.fetch = (url, options) => held(url, options)")
    page.fill("#max_tokens", "100")
    page.fill("#prompt", "go on")
    page.click("#send")
    page.wait_for_selector("#stop:not([hidden])")
    page.click("#stop")
    page.wait_for_selector("#send:not([hidden])")
    wait_until(page.server.is_idle)
    assert page.query_selector(".assistant.open") is None
    assert page.server.app.metrics.text(None).count(b'reason="gone"') >= before


def test_error_of_the_server_is_shown(page: Any) -> None:
    page.click("#clear")
    page.fill("#prompt", "x" * 200)
    page.click("#send")
    page.wait_for_selector(".error")
    assert "maximum context length is 128 tokens" in page.inner_text(".error")
