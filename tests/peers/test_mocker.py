"""Dynamo's mocker: an engine without a model that tells its KV events as vLLM does, eviction and all."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from penstock.core.hashing import routing_hashes
from penstock.gateway.replicas.zmq_events import EventSource
from tests.gateway.replicas.test_zmq_events import reading
from tests.peers.peers import checkpoint, free_port, python_of, running, wait_for
from tests.waiting import eventually_async

pytestmark = pytest.mark.slow


class Mocker:
    def __init__(self, url: str, source: EventSource, model: Path) -> None:
        self.source = source
        self._url = url
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def complete(self, text: str) -> set[int]:
        """The routing blocks of its prompt."""
        body = json.dumps({"model": "m", "prompt": text, "max_tokens": 2}).encode()
        asked = urllib.request.Request(f"{self._url}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert answer.status == 200
        return set(routing_hashes("", self._tokenizer.encode(text, add_special_tokens=False).ids))


@pytest.fixture
def mocker(tmp_path: Path) -> Iterator[Mocker]:
    python, model = python_of("mocker"), checkpoint(tmp_path)
    port, live, replay = free_port(), free_port(), free_port()
    planes = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
    engine = [
        python,
        "-m",
        "dynamo.mocker",
        "--model-path",
        str(model),
        "--model-name",
        "m",
        *planes,
        "--num-gpu-blocks-override",
        "200",
        "--block-size",
        "16",
        "--zmq-kv-events-ports",
        str(live),
        "--zmq-replay-ports",
        str(replay),
    ]
    front = [python, "-m", "dynamo.frontend", "--http-port", str(port), "--router-mode", "round-robin", *planes]
    environment = {"DYN_FILE_KV": str(tmp_path / "discovery"), "HF_HUB_OFFLINE": "1"}
    log = tmp_path / "log"
    with running(engine, tmp_path / "engine", **environment), running(front, log, **environment) as process:
        wait_for(f"http://127.0.0.1:{port}/v1/models", process, log)
        source = EventSource("mocker", f"tcp://127.0.0.1:{live}", f"tcp://127.0.0.1:{replay}")
        yield Mocker(f"http://127.0.0.1:{port}", source, model)


def text(topic: str) -> str:
    return " ".join(f"{topic} {number} is here." for number in range(150))


async def test_what_the_mocker_stores_and_evicts_is_known(mocker: Mocker) -> None:
    await eventually_async(lambda: _answers(mocker))
    async with reading(mocker.source) as index:
        first = mocker.complete(text("Sentence"))
        assert len(first) >= 3
        await eventually_async(lambda: first - index.known, lambda unknown: not unknown)
        for topic in ("Rivers", "Stones", "Clouds", "Houses"):  # more than its 3,200 tokens of cache
            last = mocker.complete(text(topic))
        await eventually_async(lambda: last - index.known, lambda unknown: not unknown)
        await eventually_async(lambda: first - index.known)  # some were evicted
        assert index.is_approximate is False
        known = set(index.known)
    async with reading(mocker.source) as index:  # a gateway that starts late
        await eventually_async(lambda: set(index.known), lambda found: found == known)


def _answers(mocker: Mocker) -> bool:
    try:
        mocker.complete("Hi")
    except OSError:
        return False
    return True
