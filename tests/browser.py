"""Pages in a real browser: the system's Chromium, which Playwright drives."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

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
    """A page that was opened from disk, offline. What it asked for and complained about is kept.

    A tab has a process of its own, so pages are opened one after the other in the same: one for each choice of scripts
    and colours. A tab in which a test failed is not used again.
    """

    _tabs: ClassVar[WeakKeyDictionary[Any, dict[tuple[bool, bool], Any]]] = WeakKeyDictionary()

    def __init__(
        self, browser: Any, path: Path, *, scripts: bool = True, dark: bool = False, fragment: str = ""
    ) -> None:
        self._of_browser = self._tabs.setdefault(browser, {})
        self._kind = scripts, dark
        if self._kind not in self._of_browser:
            context = browser.new_context(offline=True, java_script_enabled=scripts, reduced_motion="reduce")
            self._of_browser[self._kind] = context.new_page()
        self.page = self._of_browser[self._kind]
        self.page.mouse.move(0, 0)
        self.page.set_viewport_size({"width": 1000, "height": 900})
        self.page.emulate_media(media="screen", color_scheme="dark" if dark else "light")
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._listeners: dict[str, Callable[[Any], None]] = {
            "console": lambda message: self.complaints.append(message.text),
            "pageerror": lambda error: self.complaints.append(str(error)),
            "request": lambda request: self.requests.append(request.url),
        }
        for event, listener in self._listeners.items():
            self.page.on(event, listener)
        self.page.goto(f"{path.as_uri()}{fragment}")
        if scripts:
            wait_until(self.page, "document.documentElement.dataset.ready === 'yes'")

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *error: object) -> None:
        """Nothing but the file itself was asked for, and nothing went wrong."""
        if error[0] is not None:
            self._of_browser.pop(self._kind).context.close()
            return
        self.page.evaluate("0")  # answered after all that the page had to say before
        for event, listener in self._listeners.items():
            self.page.remove_listener(event, listener)
        assert self.complaints == []
        assert [url for url in self.requests if not url.startswith("file:")] == []
        assert len(self.requests) == 1
