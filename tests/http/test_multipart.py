"""Forms that come in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidRequest
from penstock.http.multipart import MultipartReader, boundary_of

BOUNDARY = b"x--y"


def form(*parts: tuple[bytes, bytes], end: bytes = b"--\r\n") -> bytes:
    joined = b"".join(b"--%b\r\n%b\r\n\r\n%b\r\n" % (BOUNDARY, head, body) for head, body in parts)
    return joined + b"--" + BOUNDARY + end


def named(name: bytes, filename: bytes | None = None) -> bytes:
    return b'Content-Disposition: form-data; name="%b"' % name + (
        b'; filename="%b"' % filename if filename is not None else b""
    )


def read(body: bytes, size: int = 1 << 20) -> tuple[bytes, MultipartReader]:
    got: list[bytes] = []
    reader = MultipartReader(BOUNDARY, "file", got.append)
    for start in range(0, len(body), size):
        reader.feed(body[start : start + size])
    reader.close()
    return b"".join(got), reader


@given(
    st.binary(max_size=200) | st.sampled_from([b"\r\n--x--", b"--x--y", b"\r\n\r\n--", b"\r\n--x-"]), st.integers(1, 50)
)
def test_a_file_comes_out_as_it_went_in_however_it_is_cut(content: bytes, size: int) -> None:
    if b"\r\n--x--y" in b"\r\n" + content:
        return
    body = form((named(b"purpose"), b"batch"), (named(b"file", b"a b.jsonl"), content), (named(b"empty"), b""))
    found, reader = read(body, size)
    assert found == content
    assert (reader.fields, reader.filename) == ({"purpose": "batch", "empty": ""}, "a b.jsonl")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        form((named(b"file"), b"x"), end=b""),
        form((named(b"file"), b"x"), end=b"!!"),
        form((b"Content-Type: text/plain", b"x")),
        form((b"no header", b"x")),
        form((named(b"a"), b"x"), (named(b"a"), b"y")),
        form((named(b"file"), b"x"), (named(b"file"), b"y")),
        form((named(b"a"), b"x" * 5000)),
        form((named(b"a") + b"; x=" + b"y" * 5000, b"x")),
        form(*((named(b"%d" % n), b"") for n in range(40))),
        b"x" * 9000,
    ],
)
def test_what_is_no_form_is_refused(body: bytes) -> None:
    for size in (1 << 20, 7):
        with pytest.raises(InvalidRequest):
            read(body, size)


@pytest.mark.parametrize(
    "content_type", [b"", b"application/json", b"multipart/form-data", b"multipart/form-data; boundary=" + b"x" * 71]
)
def test_a_form_has_a_boundary(content_type: bytes) -> None:
    with pytest.raises(InvalidRequest):
        boundary_of(content_type)
    assert boundary_of(b'Multipart/Form-Data; charset=utf-8; boundary="a b"') == b"a b"
