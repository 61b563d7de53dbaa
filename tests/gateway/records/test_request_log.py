"""Lines of requests: what is in them, whose file they go to, and that prompts are in none unless they are wanted."""

from __future__ import annotations

import base64
import io
import json
import logging
import os
import random
import re
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.core.errors import ConfigError
from penstock.gateway.records.facts import Ending, RequestFacts
from penstock.gateway.records.prompt_log import PromptSettings, PromptText
from penstock.gateway.records.request_log import LogSettings, RequestLog
from penstock.gateway.records.tenant_files import TenantFiles
from penstock.gateway.records.trace import PassedOn

BODY = b'{"model":"m","messages":[{"role":"user","content":"my card is 4111 1111 1111 1111, ann@example.org"}]}'


def facts(tenant: str = "acme", **more: object) -> RequestFacts:
    known = RequestFacts(
        "0f",
        "chat/completions",
        Ending.OK,
        "",
        tenant,
        "abc",
        "m@2",
        "http://r",
        7,
        3,
        2,
        0.001,
        0.1,
        0.5,
        1,
        route="m",
        cost=0.000012,
        trace=PassedOn("ab" * 16, b""),
        device_s=0.0125,
        kv_block_s=3.5,
    )
    return replace(known, **more)


def lines(settings: LogSettings, *all_facts: RequestFacts, body: bytes | None = None) -> list[str]:
    written = io.StringIO()
    logger = logging.Logger("lines", logging.INFO)
    logger.addHandler(logging.StreamHandler(written))
    with RequestLog(logger, settings) as log:
        for one in all_facts:
            if body is not None:
                log.asked(one.id, one.tenant, body)
            log.append(one)
    return written.getvalue().splitlines()


def test_a_line_ends_with_the_route_what_it_took_the_cost_and_the_trace_where_they_are_known() -> None:
    (line,) = lines(LogSettings(), facts())
    assert line.endswith(f"tries=1 route=m device_ms=12.5 kv_block_s=3.500 cost=0.000012000 trace={'ab' * 16}")
    (line,) = lines(LogSettings(), facts(route="m@2", device_s=None, cost=None, trace=None))
    assert line.endswith("tries=1")


def test_a_line_of_json_has_the_same_as_values() -> None:
    (line,) = lines(LogSettings(format="json"), facts(reason=""))
    said = json.loads(line)
    assert said.pop("at").endswith("Z")
    assert said == {
        "id": "0f",
        "tenant": "acme",
        "key": "abc",
        "surface": "chat/completions",
        "route": "m",
        "model": "m@2",
        "replica": "http://r",
        "outcome": "ok",
        "reason": None,
        "prompt": 7,
        "cached": 3,
        "output": 2,
        "queue_ms": 1.0,
        "ttft_ms": 100.0,
        "total_ms": 500.0,
        "tries": 1,
        "rule": None,
        "device_ms": 12.5,
        "kv_block_s": 3.5,
        "cost": 0.000012,
        "trace": "ab" * 16,
    }


def test_no_prompt_is_written_unless_it_is_wanted() -> None:
    for form in ("text", "json"):
        assert not any("card" in line for line in lines(LogSettings(format=form), facts(), body=BODY))


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_prompt_that_is_wanted_has_a_line_of_its_own_without_what_is_personal(form: str) -> None:
    prompt, line = lines(LogSettings(format=form, prompts=True), facts(), body=BODY)
    assert "my card is" in prompt
    assert "0f" in prompt
    assert not any(secret in prompt for secret in ("4111", "1111", "ann@example.org"))
    assert "card" not in line


def test_an_operators_patterns_are_cut_from_prompts_and_long_ones_are_cut_short() -> None:
    text = PromptText(PromptSettings(40, (r"SECRET-\w+",)))
    assert "alpha" not in text.of(b'{"prompt":"SECRET-alpha and more"}')
    assert len(text.of(b'{"prompt":"%b"}' % (b"x" * 100))) == 41
    assert text.of(b"no json") == ""
    with pytest.raises(ConfigError, match="no pattern"):
        PromptText(PromptSettings(40, ("(",)))


@pytest.mark.parametrize("part", ["a", "a.", "a@", "a@b.", "-", "1", "1 ", "1.", "+", "é"])
def test_no_prompt_takes_more_time_than_in_proportion_to_its_length(part: str) -> None:
    """CPU time of this thread. What grew with the square of the length took an hour for some of these."""
    text, body = PromptText(PromptSettings(1 << 18)), b'{"prompt":"a@%b@"}' % (part * (1 << 18)).encode()
    begin_s = time.thread_time()
    assert text.of(body)
    assert time.thread_time() - begin_s < 10


def test_what_is_searched_of_a_prompt_is_bounded_and_nothing_is_shown_that_was_cut_in_two() -> None:
    class Counting:
        num_chars = 0

        def sub(self, _: str, text: str) -> str:
            self.num_chars += len(text)
            return text

    text, counting = PromptText(PromptSettings(100)), Counting()
    text._patterns.append(counting)  # type: ignore[arg-type]
    for number in range(1090, 1150):  # wherever the search ends
        secret = "ann@example.org 4111 1111 1111 1111 sk-abcdefghijkl"
        shown = text.of(b'{"prompt":"%b %b %b"}' % (b"x@y.z " * 20, b"-" * (number - 140), secret.encode() * 100))
        assert not any(part in shown for part in ("ann", "4111", "1111", "sk-a"))
    assert counting.num_chars <= 60 * (100 + 1024)


@pytest.mark.parametrize(
    "image",
    [
        '{"type":"image_url","image_url":{"url":"data:image/png;base64,%s"}}',
        '{"type":"input_image","image_url": "data:;base64,%s"}',
        '{"type":"image","source":{"type":"base64","media_type":"image/png","data": "%s"}}',
    ],
)
def test_no_bytes_of_an_image_are_shown_and_the_words_behind_it_are(image: str) -> None:
    data = base64.b64encode(random.Random(3).randbytes(9000)).decode()
    for written in (data, data.replace("/", "\\/"), data.replace("=", "%3D")):
        shown = PromptText(PromptSettings(400)).of(
            b'{"messages":[{"content":[%b,{"type":"text","text":"what is this"}]}]}' % (image % written).encode()
        )
        assert "what is this" in shown
        assert not any(data[at : at + 12] in shown for at in range(0, len(data), 12))


@pytest.mark.parametrize("mail", ["a@b.c", "x+y@b-c.de", "a@b.c..d@e.f", "a@b.c+d@e.f", "a@b.c.+.d@e.f", "(a@b.c)"])
def test_a_mail_address_is_cut_wherever_it_stands(mail: str) -> None:
    assert not re.search(r"\w@\w", PromptText(PromptSettings(100)).of(b'{"prompt":"%b"}' % mail.encode()))


def test_a_record_of_the_log_is_not_much_longer_than_its_longest_line() -> None:
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logger = logging.Logger("long", logging.INFO)
    logger.addHandler(Keep())
    log = RequestLog(logger, LogSettings(prompts=True, prompt_chars=1 << 17))
    for number in range(20):
        log.asked(f"{number:02d}", "acme", b'{"prompt":"%b"}' % (b"x" * (1 << 16)))
    log.tick()
    assert max(map(len, records)) < 3 * (1 << 16)
    assert sum(record.count("prompt_text=") for record in records) == 20


def test_each_tenants_lines_go_to_a_file_of_its_own_that_nobody_else_may_read(tmp_path: Path) -> None:
    directory = tmp_path / "logs"
    settings = LogSettings(tenant_directory=str(directory))
    everybody = lines(settings, facts("acme"), facts("zeta"), facts("acme"), facts("", replica=""))
    assert len(everybody) == 4
    assert sorted(path.name for path in directory.iterdir()) == ["acme.log", "zeta.log"]
    assert [line.count("tenant=acme") for line in (directory / "acme.log").read_text().splitlines()] == [1, 1]
    assert "acme" not in (directory / "zeta.log").read_text()
    assert (directory / "acme.log").stat().st_mode & 0o077 == 0
    assert directory.stat().st_mode & 0o077 == 0


def test_a_tenants_file_never_holds_a_password_of_a_replicas_address(tmp_path: Path) -> None:
    lines(LogSettings(tenant_directory=str(tmp_path)), facts(replica="http://user:hunter2@replica"))
    assert "hunter2" not in (tmp_path / "acme.log").read_text()


def test_a_tenants_file_that_is_large_is_moved_on_and_the_one_before_dropped(tmp_path: Path) -> None:
    files = TenantFiles(tmp_path, max_bytes=30)
    for number in range(7):
        files.write([("acme", f"line {number} xxxxx")])
    files.close()
    assert (tmp_path / "acme.log").read_text() == "line 6 xxxxx\n"
    assert (tmp_path / "acme.log.1").read_text() == "line 4 xxxxx\nline 5 xxxxx\n"


def test_many_tenants_do_not_keep_as_many_files_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    files = TenantFiles(tmp_path, max_bytes=1 << 20)
    for turn in range(2):
        files.write([(f"t{number}", f"{turn}") for number in range(200)])
    assert len(os.listdir("/proc/self/fd")) - before <= 64
    files.close()
    assert (tmp_path / "t150.log").read_text() == "0\n1\n"


def test_prompts_that_nobody_takes_in_time_are_lost_and_counted() -> None:
    log = RequestLog(logging.Logger("off", logging.ERROR), LogSettings(prompts=True))
    for _ in range(5):
        log.asked("0f", "acme", b"x" * (10 << 20))
    assert log.num_lost == 2
