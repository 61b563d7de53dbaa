from __future__ import annotations

import gzip
import re

import pytest
from tools.console import is_fresh

from penstock.console.pages import load_pages

PAGES = load_pages()
NAMES = {path: path.rpartition("/")[2] or "index.html" for path in PAGES}


def test_the_committed_build_is_of_these_sources() -> None:
    assert is_fresh(), "run `make console`"


def test_the_page_and_all_it_loads_is_small() -> None:
    assert sum(len(page.gzipped) for page in PAGES.values()) < 70_000


def test_the_page_loads_only_what_is_here() -> None:
    html = PAGES["/"].plain.decode()
    links = re.findall(r'(?:src|href)="([^"]+)"', html)
    assert links
    assert all(link in PAGES for link in links)


def test_nothing_is_fetched_from_elsewhere() -> None:
    """A namespace is a name and no address."""
    for path, page in PAGES.items():
        text = page.plain.decode().replace("http://www.w3.org/", "")
        assert not re.search(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", text), path
        assert b"@import" not in page.plain


@pytest.mark.parametrize("path", PAGES)
def test_every_page_says_what_it_may_do(path: str) -> None:
    headers = dict(PAGES[path].headers)
    policy = headers[b"content-security-policy"]
    assert b"default-src 'none'" in policy
    assert b"unsafe" not in policy
    assert headers[b"x-content-type-options"] == b"nosniff"


def test_the_script_has_no_eval_and_the_page_no_script_of_its_own() -> None:
    assert not re.search(rb"\beval\(|new Function\(", PAGES["/console/console.js"].plain)
    assert not re.search(rb"<script(?![^>]*src=)", PAGES["/"].plain)
    assert b"style=" not in PAGES["/"].plain


def test_a_page_that_is_known_is_not_sent_again() -> None:
    page = PAGES["/"]
    assert page.answer(b"", page.etag)[0] == 304
    status, headers, body = page.answer(b"br, gzip", b'"other"')
    assert (status, dict(headers)[b"content-encoding"]) == (200, b"gzip")
    assert gzip.decompress(body) == page.plain
    assert page.answer(b"", b"")[2] == page.plain
