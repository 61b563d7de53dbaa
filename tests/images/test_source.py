from __future__ import annotations

import base64

import pytest

from penstock.core.errors import InvalidImage
from penstock.images.source import data_bytes, is_data, is_public, place_of

MOST = 1000


def refusal(url: str, *allowed: str) -> str | None:
    with pytest.raises(InvalidImage) as refused:
        place_of(url, allowed)
    return refused.value.reason


@pytest.mark.parametrize(
    ("url", "data"),
    [
        ("data:image/png;base64,aGVsbG8=", b"hello"),
        ("DATA:;base64,aGVsbG8=", b"hello"),
        ("data:image/png;charset=x;BASE64,aGVsbG8%3D", b"hello"),
        ("data:text/html;base64," + base64.b64encode(bytes(MOST)).decode(), bytes(MOST)),
    ],
)
def test_data_urls_hold_bytes_of_any_type(url: str, data: bytes) -> None:
    assert is_data(url)
    assert data_bytes(url, MOST) == data


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64", "url"),
        ("data:image/png,hello", "url"),
        ("data:,hello", "url"),
        ("data:;base64," + "%41" * 400, "base64"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png;base64,aGVsbG8", "base64"),
        ("data:image/png;base64,aGVs bG8=", "base64"),
        ("data:image/png;base64,aGVs\nbG8=", "base64"),
        ("data:image/png;base64,=aGVsbG8", "base64"),
        ("data:image/png;base64,äöü", "base64"),
        ("data:image/png;base64," + base64.b64encode(bytes(MOST + 1)).decode(), "bytes"),
        ("data:image/png;base64," + "A" * 10_000, "bytes"),
    ],
)
def test_data_urls_that_hold_no_image(url: str, reason: str) -> None:
    with pytest.raises(InvalidImage) as refused:
        data_bytes(url, MOST)
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://images.example/a.png",
        "gopher://images.example/",
        "/etc/passwd",
        "images.example/a.png",
        "",
        "http:/images.example/",
        "http:///a.png",
        "http://user:word@images.example/",
        "http://images.example\\@evil.example/",
        "http://images.example/a b",
        "http://images.example/\r\nX: y",
        "http://images.example:99999/",
        "http://[::1/",
        "http://images.example/" + "a" * 10_000,
    ],
)
def test_what_is_no_url_of_the_web_is_fetched_from_nowhere(url: str) -> None:
    assert refusal(url, "*") == "url"


def test_nothing_is_fetched_unless_its_host_is_allowed() -> None:
    assert refusal("https://images.example/") == "remote"
    allowed = ("images.example", "*.cdn.example", "lan.example:8080")
    for url in (
        "https://evil.example/",
        "https://images.example.evil.example/",
        "https://cdn.example/",
        "https://evilcdn.example/",
        "https://images.example:22/",
        "http://lan.example/",
        "http://lan.example:8081/",
    ):
        assert refusal(url, *allowed) == "remote"
    place = place_of("HTTPS://Images.Example./a/b?c=d#e", allowed)
    assert (place.scheme, place.host, place.port, place.path) == ("https", "images.example", 443, "/a/b?c=d")
    assert place_of("http://a.b.cdn.example", allowed).path == "/"
    assert place_of("http://lan.example:8080/x", allowed).port == 8080
    assert place_of("https://[2606:4700::1]/x", ("*",)).host == "2606:4700::1"
    assert refusal("https://[2606:4700::1]:8443/x", "*") == "remote"


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.255.0.9",
        "0.0.0.0",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "192.0.0.8",
        "198.18.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::127.0.0.1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "::ffff:10.0.0.1",
        "fe80::1",
        "fe80::1%eth0",
        "fec0::1",
        "fc00::1",
        "fd00:ec2::254",
        "ff02::1",
        "64:ff9b::7f00:1",
        "64:ff9b:1::a00:1",
        "2002:7f00:1::",
        "2002:a00:1::",
        "2001:0:7f00:1::",
        "2001:db8::1",
        "localhost",
        "",
    ],
)
def test_addresses_that_nothing_is_fetched_from(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "::ffff:1.1.1.1"])
def test_addresses_of_the_internet_at_large(address: str) -> None:
    assert is_public(address)
