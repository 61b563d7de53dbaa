"""What a client may say of its request, and to whom that is told."""

from __future__ import annotations

import openai
import pytest

from penstock.core.errors import InvalidRequest
from penstock.gateway.proxy.request_view import EXPECTED_OUTPUT, expected_output
from penstock.router.request import EdgeRequest
from penstock.router.router import Choice
from tests.dialects.servers import FakeVllm
from tests.gateway.replicas.test_mixed_fleet import fleet
from tests.gateway.running import running_gateway
from tests.server.replica import NAME, serving


class Heard:
    """A listener of the recorder."""

    def __init__(self) -> None:
        self.expected: list[int] = []

    def chose(self, request: EdgeRequest, choice: Choice) -> None:
        self.expected.append(request.expected_output)

    def ended(self, facts: object) -> None:
        pass


def test_a_number_of_tokens_is_one() -> None:
    assert expected_output({}) is None
    assert expected_output({EXPECTED_OUTPUT: b" 120 "}) == 120
    assert expected_output({EXPECTED_OUTPUT: b"007"}) == 7


@pytest.mark.parametrize("said", [b"", b"0", b"-5", b"+5", b"1.5", b"many", b"1e3", b"9" * 10, b"9" * 100_000, b"\xb2"])
def test_what_is_none_is_refused(said: bytes) -> None:
    with pytest.raises(InvalidRequest, match="x-penstock-expected-output"):
        expected_output({EXPECTED_OUTPUT: said})


def test_the_hint_is_what_the_picks_go_by_for_every_choice_and_within_the_limit() -> None:
    heard = Heard()
    with serving() as one, running_gateway(one) as gateway:
        gateway.call(lambda: gateway.app.recorder.listeners.append(heard))

        def ask(hint: str | None, **options: int) -> None:
            headers = {"x-penstock-expected-output": hint} if hint else None
            gateway.openai.completions.create(model=NAME, prompt="so", extra_headers=headers, **options)

        ask("7", max_tokens=20)
        ask("7", max_tokens=20, n=2)
        ask("7", max_tokens=5)
        with pytest.raises(openai.BadRequestError) as caught:
            ask("a few", max_tokens=5)
        assert caught.value.param == "x-penstock-expected-output"
    assert heard.expected == [7, 14, 5]


def test_servers_are_not_told_of_it() -> None:
    with FakeVllm(NAME) as vllm, fleet(vllm.url) as gateway:
        gateway.openai.completions.create(
            model=NAME, prompt="so", max_tokens=3, extra_headers={"x-penstock-expected-output": "2"}
        )
        (headers,) = [headers for path, _, headers in vllm.asked if path == "/v1/completions"]
        assert not [name for name in headers if name.lower().startswith("x-penstock")]
