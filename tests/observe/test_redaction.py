"""No credential is ever written, whoever logs it."""

import io
import logging
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.observe.redaction import RedactCredentials, redact
from penstock.tenancy.keys import new_key

KEYS = [new_key("acme", now_s=0)]


@given(st.text(), st.text())
def test_no_text_shows_a_key(before: str, after: str) -> None:
    key = KEYS[0]
    shown = redact(f"{before}{key.secret}{after}")
    assert key.secret.rpartition("_")[2] not in shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"key {KEYS[0].secret}!", f"key {KEYS[0].record.prefix}_…!"),
        ("Authorization: Bearer abc.def-123", "Authorization: Bearer …"),
        ("{'x-api-key': 'abc123'}", "{'x-api-key': '…'}"),
        ("sk-ant-REDACTED failed", "sk-ant-… failed"),
        ("postgresql://me:secret@db/x", "postgresql://me:…@db/x"),
        ("nothing to hide: a task-sk-1, http://host:80/x", "nothing to hide: a task-sk-1, http://host:80/x"),
    ],
    ids=range(6),
)
def test_credentials_are_cut_down_to_what_may_be_shown(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize(
    "part",
    ["a.b+", "a://", "a://b:", "psk_", "bearer ", "authorization: ", "x-api-key:", "sk-", "authorization", " ", ":"],
)
def test_no_text_takes_more_time_than_in_proportion_to_its_length(part: str) -> None:
    """CPU time of this thread. What grew with the square of the length took minutes for each of these."""
    begin_s = time.thread_time()
    for end in ("@", "basic", "bearer", "x-api-key"):
        redact(part * (100_000 // len(part)) + end)
        redact(f"{end}{part * (100_000 // len(part))}")
    assert time.thread_time() - begin_s < 5


def test_no_log_shows_a_key_in_a_message_an_argument_or_a_traceback() -> None:
    written = io.StringIO()
    output = logging.StreamHandler(written)
    output.addFilter(RedactCredentials())
    log = logging.Logger("redacted")
    log.addHandler(output)
    secret = KEYS[0].secret
    log.warning("refused %s", secret)
    try:
        raise ValueError(f"bad key {secret}")
    except ValueError:
        log.exception("with %s", {"key": secret})
    assert secret.rpartition("_")[2] not in written.getvalue()
    assert "ValueError: bad key psk_" in written.getvalue()
