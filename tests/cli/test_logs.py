"""Nothing that a gateway's process writes shows a credential, whichever way it gets out."""

import subprocess
import sys

import pytest

from tests.cli.test_main import penstock

KEY = "psa_0123456789_abcdefghijklmnopqrstuvwxyzABCDEF"
PROGRAM = f"""
import logging, threading, warnings
from penstock.cli.logs import configure_logs, log_the_uncaught, write_lines_bare
configure_logs("debug")
log_the_uncaught()
write_lines_bare("lines")
def fail():
    raise ValueError("told {KEY}")
"""


@pytest.mark.parametrize(
    "how",
    [
        "fail()",
        "thread = threading.Thread(target=fail); thread.start(); thread.join()",
        "warnings.warn('told {KEY}')",
        "logging.getLogger('any').debug('told %s', {'authorization': b'Bearer {KEY}'})",
        "logging.getLogger('any').info('told %d', '{KEY}')",  # an argument that does not fit
        "logging.getLogger('lines').warning('told {KEY}')",
        "logging.getLogger('any').info('told', stack_info=True, extra={}); x = '{KEY}'; fail()",
    ],
    ids=range(7),
)
def test_nothing_written_shows_a_key(how: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM + how.replace("{KEY}", KEY)], capture_output=True, text=True, check=False
    )
    assert "told" in ended.stderr
    assert KEY[15:] not in ended.stdout + ended.stderr


@pytest.mark.parametrize("url", ["postgresql://me:hunter2@127.0.0.1:1/x", "mysql://me:hunter2@127.0.0.1/x"])
def test_a_store_that_cannot_be_opened_does_not_show_its_password(url: str) -> None:
    ended = penstock("tenants", "list", "--store", url)
    assert ended.returncode != 0
    assert "hunter2" not in ended.stdout + ended.stderr
