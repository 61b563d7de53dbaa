"""One real model served by a penstock replica and by llama.cpp behind one gateway, all of them processes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.cli.real_gateway import RealGateway, real_gateway
from tests.cli.real_server import MODEL, real_server
from tests.gateway.llamacpp import llamacpp_serving
from tests.waiting import eventually

pytestmark = pytest.mark.slow


def states(gateway: RealGateway) -> dict[str, str]:
    """By kind."""
    _, found = gateway.ask("GET", "/admin/v1/replicas")
    return {one["kind"]: one["state"] for one in found["replicas"]}


def in_flight(gateway: RealGateway) -> dict[str, int]:
    """By kind."""
    _, found = gateway.ask("GET", "/admin/v1/replicas")
    return {one["kind"]: one["in_flight"] for one in found["replicas"]}


@contextlib.contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def ask_all(gateway: RealGateway, numbers: Iterable[int]) -> Counter[str]:
    """How many streams each replica answered, to their end."""
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60)

    def ask(number: int) -> str:
        messages: Any = [{"role": "user", "content": f"Tell me of the number {number}."}]
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=messages,
            max_tokens=6,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(raw.parse())
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices).strip()
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 6
        return str(raw.headers["x-penstock-replica"])

    with ThreadPoolExecutor(6) as clients:
        return Counter(clients.map(ask, numbers))


def test_both_are_used_and_either_takes_over_from_the_other(tmp_path: Path) -> None:
    with real_server("--threads", "1") as own, llamacpp_serving() as foreign:
        models = {MODEL: {"replicas": [own.url, foreign.url]}}
        with real_gateway(tmp_path, models=models) as gateway:
            eventually(lambda: states(gateway), lambda seen: seen == {"penstock": "ready", "llamacpp": "ready"})
            with ThreadPoolExecutor(1) as clients, stopped(own.engine_process()):
                # One by one all might go to the quicker.
                asked = clients.submit(ask_all, gateway, range(24))
                eventually(lambda: in_flight(gateway), lambda seen: all(seen.values()))
            assert len(asked.result()) == 2

            foreign.process.kill()
            eventually(lambda: states(gateway)["llamacpp"], lambda seen: seen == "out")
            assert len(ask_all(gateway, range(4))) == 1

            with llamacpp_serving(foreign.port):  # it comes back
                eventually(lambda: states(gateway)["llamacpp"], lambda seen: seen == "ready")
                own.engine_process().kill()
                own.process.kill()
                eventually(lambda: states(gateway)["penstock"], lambda seen: seen == "out")
                assert len(ask_all(gateway, range(4))) == 1
            log = gateway.log.read_text()
            assert f"{foreign.url} (llamacpp) of {MODEL} is out" in log
            assert f"{own.url} (penstock) of {MODEL} is out" in log
