"""The documentation site: it is built without a warning, is complete, and loads nothing from anywhere else.

`mkdocs build` is strict: a broken link or anchor, or a page that is in no menu, ends it. The build takes some seconds,
so all processes of a test run share one.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import http.server
import importlib
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser, ViewportSize, sync_playwright
from playwright.sync_api import Page as Tab

from tests.static.test_public_face import MODULES
from tools import docs_site

ROOT = Path(__file__).resolve().parents[2]
SIZES: Final[tuple[ViewportSize, ...]] = ({"width": 360, "height": 740}, {"width": 1280, "height": 900})


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The folder of the built site; whoever comes first builds it."""
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent
    target = shared / "documentation-site"
    with (shared / "documentation-site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / "sitemap.xml").exists():
            built = subprocess.run(
                [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)],
                cwd=ROOT,
                env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            assert built.returncode == 0, built.stdout + built.stderr
    return target


class Loaded(HTMLParser):
    """Addresses that a browser fetches by itself, and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.addresses.append(given["href"])
        self.addresses += [given[name] for name in ("src", "srcset", "poster") if tag != "a" and name in given]
        if "id" in given:
            self.anchors.add(given["id"])


def test_every_page_of_the_folder_is_built(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}

    assert {str(page) for page in pages if not (site / page).exists()} == set()
    assert {page for page in docs_site.BESIDE.values() if not (site / page).with_suffix(".html").exists()} == set()


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    """Readers of internal documentation are nobody's business, and a page must not change when a stranger's does."""
    foreign = {
        f"{page.relative_to(site)}: {address}"
        for page in site.rglob("*.html")
        for address in Loaded(page.read_text()).addresses
        if re.match(r"(?:\w+:)?//", address)
    }
    imported = {
        f"{sheet.relative_to(site)}: {address}"
        for sheet in site.rglob("*.css")
        for address in re.findall(r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]+)", sheet.read_text())
    }

    assert foreign | imported == set()


def test_the_reference_has_every_public_name(site: Path) -> None:
    """It is made from the code, so a name can only be missing because its module is."""
    assert docs_site.MODULES == MODULES
    pages = [(site / page).with_suffix(".html") for page, _ in docs_site.api_pages()]
    # What several modules offer is shown by its full name in each.
    anchors = set[str]().union(*(Loaded(page.read_text()).anchors for page in pages))
    names = {f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__}

    assert {name for name in names - anchors if not name.endswith(".__version__")} == set()


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed; apt-get install chromium")
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(
            executable_path=program,
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server"],
        )
        yield made
        made.close()


@contextlib.contextmanager
def tabs(browser: Browser) -> Iterator[list[Tab]]:
    """One of a phone, one of a desktop: a tab that changes its size moves its menus for a while."""
    with contextlib.ExitStack() as stack:
        opened = []
        for size in SIZES:
            context = stack.enter_context(contextlib.closing(browser.new_context(viewport=size)))
            opened.append(context.new_page())
            opened[-1].set_default_timeout(120_000)
        yield opened


def is_too_wide(tab: Tab, address: str) -> bool:
    """Open one page; whether it needs a horizontal scroll bar."""
    tab.goto(address)
    return bool(tab.evaluate("document.documentElement.scrollWidth > window.innerWidth"))


SOME_PAGES = ("index.html", "guides/outbox.html", "reference/settings.html", "api/sync.html")
"""With wide tables, long blocks and long names."""


def test_pages_fit_a_phone_and_search_finds_a_setting(site: Path, browser: Browser) -> None:
    with served(site) as url, tabs(browser) as opened:
        asked: list[str] = []
        for tab in opened:
            tab.on("request", lambda request: asked.append(request.url))
        too_wide = [page for page in SOME_PAGES for tab in opened if is_too_wide(tab, f"{url}/{page}")]
        opened[1].locator(".md-search__input").fill("BULLPEN_REDIS_URL")
        opened[1].locator(".md-search-result__link").first.wait_for()

    assert too_wide == []
    assert [address for address in asked if not address.startswith((url, "blob:", "data:"))] == []


# Above two seconds with a reason: each page is laid out by a browser, twice.
@pytest.mark.long
@pytest.mark.timeout(900)
def test_no_page_has_a_horizontal_scroll_bar(site: Path, browser: Browser) -> None:
    pages = sorted(str(page.relative_to(site)) for page in site.rglob("*.html"))
    with served(site) as url, tabs(browser) as opened:
        too_wide = [page for page in pages for tab in opened if is_too_wide(tab, f"{url}/{page}")]

    assert len(pages) > 60
    assert too_wide == []
