"""Chromium, driven by Playwright: a browser for the tests, and pages that remember what went wrong in them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

from tests.waiting import GIVE_UP_S

# The first has no window to draw, and takes little more than half the CPU time.
_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Skips where there is none: it is no Python package."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip("chromium is not installed: apt-get install chromium-headless-shell")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@contextlib.contextmanager
def opened(
    browser: Any, url: str, *, is_dark: bool = False, width: int = 1280, height: int = 860, is_touch: bool = False
) -> Iterator[Any]:
    """A page of a fresh browser. Whatever its script threw, or its policy forbade, fails the test at the end."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if is_dark else "light", has_touch=is_touch
    )
    page = context.new_page()
    page.set_default_timeout(1e3 * GIVE_UP_S)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if "Policy" in said.text else None)
    page.goto(url)
    yield page
    context.close()
    assert problems == []


def is_too_wide(page: Any) -> bool:
    """Whether it must be moved sideways to be read."""
    return bool(page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))


def contrast(page: Any, selector: str) -> float:
    """Returns the contrast of an element's text with the ground that it stands on, as WCAG counts it."""
    return float(
        page.eval_on_selector(
            selector,
            """element => {
              const rgb = text => text.match(/[\\d.]+/g).map(Number);
              const light = ([r, g, b]) => {
                const part = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
                return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
              };
              let ground = element;
              const behind = at => rgb(getComputedStyle(at).backgroundColor);
              while (ground.parentElement && behind(ground)[3] === 0) ground = ground.parentElement;
              const [a, b] = [rgb(getComputedStyle(element).color), behind(ground)].map(light);
              return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
            }""",
        )
    )
