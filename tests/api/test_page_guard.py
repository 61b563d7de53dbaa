"""Foreign web pages are told from everybody else."""

import pytest

from penstock.api.page_guard import PageGuard
from penstock.core.errors import PermissionDenied


def refuses(guard: PageGuard, host: bytes = b"127.0.0.1:8000", **headers: bytes) -> bool:
    sent = {name.replace("_", "-").encode(): value for name, value in headers.items()}
    try:
        guard.check({b"host": host, **sent})
    except PermissionDenied:
        return True
    return False


@pytest.mark.parametrize(
    "host", [b"127.0.0.1:8000", b"localhost:8000", b"LOCALHOST", b"[::1]:8000", b"10.1.2.3:80", b"box.lan:8000", b""]
)
def test_clients_call_a_local_server_by_address_or_localhost_or_the_name_it_listens_on(host: bytes) -> None:
    assert not refuses(PageGuard(), host) or host == b"box.lan:8000"
    assert not refuses(PageGuard(allowed_hosts=["Box.lan"]), host)
    assert not refuses(PageGuard("box.lan"), host)
    if host:
        assert not refuses(PageGuard(allowed_hosts=["box.lan"]), host, origin=b"http://" + host)


@pytest.mark.parametrize(
    "host", [b"evil.example:8000", b"127.0.0.1.evil.example", b"localhost:80@evil.example", b":80"]
)
def test_a_name_that_nobody_configured_may_hide_a_page(host: bytes) -> None:
    assert refuses(PageGuard(), host)
    assert refuses(PageGuard("127.0.0.2"), host)
    assert refuses(PageGuard("0.0.0.0", ["box.lan"]), host)
    assert not refuses(PageGuard("0.0.0.0"), host)  # what its names are is its operator's affair


@pytest.mark.parametrize("listens", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": b"http://evil.example"},
        {"origin": b"http://127.0.0.1:3000"},
        {"origin": b"http://localhost:8000"},
        {"origin": b"null"},
        {"origin": b""},
        {"origin": b"null", "host": b""},
        {"sec_fetch_site": b"cross-site"},
        {"sec_fetch_site": b"same-site"},
        {"origin": b"http://127.0.0.1:8000", "sec_fetch_site": b"cross-site"},
    ],
)
def test_pages_of_other_origins_are_refused(listens: str, headers: dict[str, bytes]) -> None:
    assert refuses(PageGuard(listens), **headers)
    assert refuses(PageGuard(listens, ["chat.example"]), **headers)


def test_pages_of_its_own_and_of_a_configured_name_are_let_in() -> None:
    own = {"origin": b"http://127.0.0.1:8000", "sec_fetch_site": b"same-origin"}
    assert not refuses(PageGuard(), **own)
    proxied = {"origin": b"https://chat.example", "sec_fetch_site": b"same-site"}
    assert refuses(PageGuard(), **proxied)
    assert not refuses(PageGuard(allowed_hosts=["chat.example"]), **proxied)


@pytest.mark.parametrize("origins", [["https://Chat.example/"], ["*"]])
def test_pages_of_allowed_origins_may_use_it(origins: list[str]) -> None:
    guard = PageGuard(allowed_origins=origins)
    assert not refuses(guard, origin=b"https://chat.example", sec_fetch_site=b"cross-site")
    assert refuses(guard, origin=b"https://evil.example") == (origins != ["*"])
    assert refuses(guard, sec_fetch_site=b"cross-site")  # an image or a link, which no page reads
    assert refuses(guard, b"evil.example")
