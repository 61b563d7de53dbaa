"""Prompts that one worker of Dynamo's mocker computes and another answers, in the rooms that the gateway names.

The mocker's workers meet at the bootstrap server of the one that computes, as SGLang's do: who decodes waits until the
other has put the KV into the same room. They speak Dynamo's own protocol, so SGLang's HTTP in front of each is a
fake's, which hands on what the gateway sent."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.dialects.servers import Reply, as_json
from tests.gateway.pairs import PairedSglang, handovers, in_front_of
from tests.peers.peers import checkpoint, free_port, python_of, running

pytestmark = pytest.mark.slow

_WORDS = "The quick brown fox"

# A line in for each request, with its prompts and their rooms; a line out, with the tokens of each or what went wrong.
# Dynamo numbers handovers besides: the room's own number will do.
_BRIDGE = """
import asyncio, json, sys, uuid
from dynamo.runtime import Context, DistributedRuntime

async def generate(client, worker, prompt, max_tokens, room):
    number = uuid.UUID(int=room["bootstrap_room"])
    request = {"model": "m", "token_ids": list(prompt.encode()), "eos_token_ids": [], "annotations": [],
               "sampling_options": {}, "output_options": {},
               "stop_conditions": {"max_tokens": max_tokens, "ignore_eos": True},
               "bootstrap_info": {**room, "handoff_id": number.bytes}}
    stream = await client.direct(request, worker, context=Context(str(number)))
    return [token async for part in stream for token in part.data()["token_ids"]]

async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    client = await runtime.endpoint(sys.argv[1]).client()
    [worker] = await client.wait_for_instances()
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            said = {"tokens": await asyncio.gather(*(generate(client, worker, *one) for one in json.loads(line)))}
        except Exception as error:
            said = {"error": str(error)}
        print(json.dumps(said), flush=True)

asyncio.run(main())
"""


class Worker:
    """A worker of the mocker, and a process that speaks to it."""

    def __init__(self, engine: subprocess.Popen[bytes], bridge: subprocess.Popen[str]) -> None:
        self.engine = engine
        self._bridge = bridge
        self._lock = threading.Lock()

    def generate(self, prompts: list[str], max_tokens: int, rooms: list[dict[str, Any]]) -> list[list[int]]:
        asked = [[prompt, max_tokens, room] for prompt, room in zip(prompts, rooms, strict=True)]
        assert self._bridge.stdin is not None
        assert self._bridge.stdout is not None
        with self._lock:
            self._bridge.stdin.write(json.dumps(asked) + "\n")
            self._bridge.stdin.flush()
            said: dict[str, Any] = json.loads(next(line for line in self._bridge.stdout if line.startswith("{")))
        if "error" in said:
            raise RuntimeError(said["error"])
        found: list[list[int]] = said["tokens"]
        return found


class Mocker:
    def __init__(self, home: Path) -> None:
        self._python, self._model, self._home = python_of("mocker"), checkpoint(home), home
        self._environment = {"DYN_FILE_KV": str(home / "discovery"), "HF_HUB_OFFLINE": "1", "DYN_LOG": "error"}

    @contextlib.contextmanager
    def worker(self, name: str, mode: str, bootstrap_port: int | None = None) -> Iterator[Worker]:
        endpoint = f"dynamo.{name}.generate"
        command = [self._python, "-m", "dynamo.mocker", "--model-path", str(self._model), "--model-name", "m"]
        command += ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
        command += ["--engine-type", "sglang", "--disaggregation-mode", mode, "--endpoint", f"dyn://{endpoint}"]
        command += ["--bootstrap-ports", str(bootstrap_port)] if bootstrap_port else []
        with (
            running(command, self._home / name, **self._environment) as engine,
            running_bridge([self._python, "-c", _BRIDGE, endpoint], self._environment) as bridge,
        ):
            yield Worker(engine, bridge)


@contextlib.contextmanager
def running_bridge(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=os.environ | environment, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@dataclass
class MockedSglang(PairedSglang):
    """SGLang's HTTP in front of a worker of the mocker."""

    worker: Worker | None = None
    made: list[int] = field(default_factory=list)  # tokens, of each prompt

    def meet(self, asked: dict[str, Any], rooms: list[int]) -> Reply | None:
        assert self.worker is not None
        prompts = asked["prompt"] if isinstance(asked["prompt"], list) else [asked["prompt"]]
        names = ("bootstrap_host", "bootstrap_port")
        where = {name: asked[name][0] if isinstance(asked[name], list) else asked[name] for name in names}
        max_tokens = 1 if self.mode == "prefill" else asked["max_tokens"]
        try:
            tokens = self.worker.generate(prompts, max_tokens, [{**where, "bootstrap_room": one} for one in rooms])
        except RuntimeError as error:
            return as_json({"error": {"message": str(error), "code": 500}}, 500)
        self.made += map(len, tokens)
        return None


@pytest.fixture(scope="module")
def mocker(tmp_path_factory: pytest.TempPathFactory) -> Mocker:
    return Mocker(tmp_path_factory.mktemp("mocker"))


@contextlib.contextmanager
def servers(mocker: Mocker, *bootstrap_ports: int) -> Iterator[tuple[list[MockedSglang], MockedSglang]]:
    with contextlib.ExitStack() as stack:
        prefills = [
            MockedSglang(mode="prefill", worker=stack.enter_context(mocker.worker(f"prefill{port}", "prefill", port)))
            for port in bootstrap_ports
        ]
        decode = MockedSglang(worker=stack.enter_context(mocker.worker(f"decode{bootstrap_ports[0]}", "decode")))
        for one in (*prefills, decode):
            stack.enter_context(one)
        yield prefills, decode


def test_workers_of_the_mocker_meet_in_the_rooms_that_the_gateway_names(mocker: Mocker) -> None:
    port = free_port()
    with servers(mocker, port) as ([p], d):
        assert d.worker is not None
        with pytest.raises(RuntimeError, match="bootstrap connection failed"):  # a worker that decodes needs the other
            d.worker.generate(
                ["Hi"], 1, [{"bootstrap_host": "127.0.0.1", "bootstrap_port": free_port(), "bootstrap_room": 1}]
            )
        with in_front_of((p, "prefill"), (d, "decode"), bootstrap_port=port) as gateway:
            stream = gateway.openai.completions.create(model="m", prompt="The water falls", max_tokens=4, stream=True)
            assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == _WORDS
            assert (p.made, d.made) == ([1], [4])
            assert handovers(gateway, "handed_over")
            gateway.openai.completions.create(model="m", prompt=["one", "two"], max_tokens=3)
            assert (p.made, d.made) == ([1, 1, 1], [4, 3, 3])  # each has a room of its own


def test_a_worker_of_the_mocker_that_is_gone_is_replaced_by_another_with_a_room_of_its_own(mocker: Mocker) -> None:
    ports = [free_port(), free_port()]
    with servers(mocker, *ports) as (prefills, d):
        roles = [(p, "prefill", port) for p, port in zip(prefills, ports, strict=True)]
        with in_front_of(*roles, (d, "decode")) as gateway:

            def ask() -> str:
                found = gateway.openai.completions.create(model="m", prompt="The water falls", max_tokens=4)
                return found.choices[0].text

            assert ask() == _WORDS
            [gone], [other] = [p for p in prefills if p.made], [p for p in prefills if not p.made]
            assert gone.worker is not None
            gone.worker.engine.kill()
            gone.worker.engine.wait()
            assert ask() == _WORDS
            assert len(gone.asked) == 2  # it was tried, and could not
            assert (gone.made, other.made, d.made) == ([1], [1], [4, 4])
