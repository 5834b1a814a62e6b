"""Pages in a real browser: the system's Chromium, which Playwright drives."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def browser() -> Iterator[Any]:
    """A browser without a window; a test that asks for one is skipped where there is none."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with playwright.sync_playwright() as driver:
        # Root has no sandbox; a container's /dev/shm is small.
        launched = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        )
        yield launched
        launched.close()


def wait_until(page: Any, expression: str) -> None:
    """Ask a page until `expression` holds, from outside: its policy lets nobody evaluate text inside of it."""
    end = time.monotonic() + 30
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"{expression} did not come true"
        page.wait_for_timeout(20)


class Opened:
    """A page that was opened from disk, offline. What it asked for and complained about is kept."""

    def __init__(self, browser: Any, path: Path, *, scripts: bool = True, dark: bool = False) -> None:
        self.context = browser.new_context(
            viewport={"width": 1000, "height": 900},
            offline=True,
            java_script_enabled=scripts,
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
        )
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        if scripts:
            wait_until(self.page, "document.documentElement.dataset.ready === 'yes'")

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *error: object) -> None:
        """Nothing but the file itself was asked for, and nothing went wrong."""
        self.context.close()
        if error[0] is None:
            assert self.complaints == []
            assert [url for url in self.requests if not url.startswith("file:")] == []
            assert len(self.requests) == 1
