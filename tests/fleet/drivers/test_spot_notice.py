"""Answers of metadata endpoints."""

from __future__ import annotations

import pytest

from penstock.fleet.drivers.spot_notice import seconds_left


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (404, b"", None),
        (200, b"FALSE", None),
        (200, b"TRUE", 30.0),
        (200, b'{"action": "terminate", "time": "1970-01-01T00:03:20Z"}', 100.0),
        (200, b'{"action": "stop", "time": "1970-01-01T00:03:20"}', 100.0),
        (200, b'{"action": "terminate", "time": "soon"}', 30.0),
        (500, b"oops", None),
    ],
)
def test_notice_names_the_time_that_is_left(status: int, body: bytes, expected: float | None) -> None:
    assert seconds_left(status, body, 100.0) == expected
