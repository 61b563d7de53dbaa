"""Every answer that a client gets is charged, whatever kind of server made it and whatever that says of its usage."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from penstock.gateway.settings.gateway import ModelSettings
from tests.clocks import ManualClock
from tests.dialects.servers import FAKES, PROMPT_TOKENS, WORDS, FakeServer, FakeVllm
from tests.gateway.other_servers import FakeOpenai, in_front_of
from tests.gateway.running import RunningGateway, running_gateway
from tests.waiting import GIVE_UP_S, eventually

STREAM = {"model": "m", "prompt": "Once upon a time", "max_tokens": len(WORDS), "stream": True}
_USAGE = re.compile(rb'"usage": ?\{[^{}]*\}')


class Silent(FakeOpenai):
    """It does not say what its answers used, whether it is asked or not."""

    def answer(self, path: str, asked: dict[str, Any]) -> tuple[bool, list[bytes]]:
        is_stream, parts = super().answer(path, asked)
        return is_stream, [_USAGE.sub(b'"usage":{}', part) for part in parts]


def ask(gateway: RunningGateway, body: bytes | dict[str, Any], path: str = "/v1/completions", key: str = "none") -> str:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=GIVE_UP_S)
    with contextlib.closing(connection):
        connection.request("POST", path, content, {"authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        told = answer.read().decode()
    assert answer.status == 200, told
    return told


def charged(gateway: RunningGateway) -> tuple[int, int]:
    usages = eventually(lambda: list(gateway.ledger.usages))
    assert len(usages) == 1
    return usages[0].input_tokens, usages[0].output_tokens


@pytest.mark.parametrize("kind", [*FAKES, FakeOpenai], ids=lambda kind: kind.dialect)
def test_a_stream_is_charged_whatever_its_servers_dialect(kind: type[FakeServer]) -> None:
    with kind() as server, in_front_of(server) as gateway:
        told = ask(gateway, STREAM)
        assert charged(gateway) == (PROMPT_TOKENS, len(WORDS))
        assert 'data: {"usage"' not in told  # the client did not ask for it


@pytest.mark.parametrize("kind", [*FAKES, FakeOpenai], ids=lambda kind: kind.dialect)
def test_a_stream_is_charged_where_the_dialect_is_configured_and_nothing_is_probed(kind: type[FakeServer]) -> None:
    with kind() as server, in_front_of(server, dialect=kind.dialect, probe_every_s=0.0) as gateway:
        ask(gateway, STREAM)
        assert charged(gateway) == (PROMPT_TOKENS, len(WORDS))


def test_a_stream_of_a_paid_provider_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVIDER_KEY", "sk-1")
    with FakeOpenai() as server, in_front_of(server, key_env="PROVIDER_KEY") as gateway:
        ask(gateway, STREAM)
        assert charged(gateway) == (PROMPT_TOKENS, len(WORDS))


def test_whether_a_request_streams_is_read_from_its_body_however_that_is_spelt() -> None:
    spelt = json.dumps(STREAM).replace('"stream"', '"str\\u0065am"').encode()
    with FakeOpenai() as server, in_front_of(server, dialect="openai") as gateway:
        told = ask(gateway, spelt)
        assert server.asked[0][1]["stream_options"] == {"include_usage": True}
        assert charged(gateway) == (PROMPT_TOKENS, len(WORDS))
        assert '"choices": []' not in told


def test_a_server_that_says_no_usage_is_charged_by_the_events_of_a_stream(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), Silent() as server, in_front_of(server) as gateway:
        ask(gateway, STREAM)
        prompt, output = charged(gateway)
        assert prompt >= len(STREAM["prompt"].split())  # type: ignore[attr-defined]
        assert output >= len(WORDS)
        assert 'penstock_gateway_usage_missing_total{model="m"} 1' in gateway.metrics()
        assert f"{server.url} does not say what its answers of m used" in caplog.text


def test_a_server_that_says_no_usage_is_charged_what_was_reserved_for_a_whole_answer() -> None:
    with Silent() as server, in_front_of(server) as gateway:
        ask(gateway, STREAM | {"stream": False, "max_tokens": 9})
        prompt, output = charged(gateway)
        assert prompt >= len(STREAM["prompt"].split())  # type: ignore[attr-defined]
        assert output == 9


def test_a_stream_that_breaks_off_is_charged_for_what_the_client_got() -> None:
    class Breaking(FakeOpenai):
        def answer(self, path: str, asked: dict[str, Any]) -> Any:
            def parts() -> Iterator[bytes]:
                yield from super(Breaking, self).answer(path, asked)[1][:3]
                raise ConnectionResetError

            return True, parts()

    with Breaking() as server, in_front_of(server) as gateway:
        assert "the replica failed in the middle of the answer" in ask(gateway, STREAM)
        assert charged(gateway)[1] == 2


def test_anthropics_streams_say_at_their_beginning_how_long_the_prompt_is() -> None:
    class Anthropic(FakeOpenai):
        def answer(self, path: str, asked: dict[str, Any]) -> tuple[bool, list[bytes]]:
            start = {"type": "message_start", "message": {"usage": {"input_tokens": 25, "output_tokens": 1}}}
            delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "x" * 200}}
            end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 15}}
            events = [start, *([delta] * 40), end, {"type": "message_stop"}]
            return True, [f"event: {one['type']}\ndata: {json.dumps(one)}\n\n".encode() for one in events]

    asked = {"model": "m", "max_tokens": 50, "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
    with Anthropic() as server, in_front_of(server) as gateway:
        ask(gateway, asked, "/v1/messages")
        assert charged(gateway) == (25, 15)


def test_streams_of_a_provider_are_limited() -> None:
    with FakeOpenai() as server:
        pools = {"m": ModelSettings(replicas=[server.url], dialect="openai", probe_every_s=0.0)}
        with running_gateway(pools=pools, clock=ManualClock()) as gateway:
            key = gateway.add_tenant("acme", limits={"tokens_per_minute": 200})
            client = gateway.client(key)

            def stream(times: int) -> None:
                for _ in range(times):
                    list(client.completions.create(model="m", prompt="Hi", max_tokens=5, stream=True))
                    eventually(gateway.is_idle)

            stream(times=2)
            with pytest.raises(openai.RateLimitError):
                stream(times=20)


def test_a_stream_of_vllm_keeps_its_tenants_cache_apart_though_it_is_not_probed() -> None:
    with FakeVllm() as server, in_front_of(server, probe_every_s=0.0) as gateway:
        key = gateway.add_tenant("acme")
        ask(gateway, STREAM, key=key)
        assert server.asked[0][1]["cache_salt"]
