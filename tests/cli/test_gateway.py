"""`penstock serve MODEL --replicas 2` as a user starts it: keys by command, streams that outlive their replicas."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.patience import Patience
from tests.sdk import Unverified

pytestmark = pytest.mark.slow

MESSAGES: Any = [{"role": "user", "content": "Tell me of a river."}]


@dataclass
class Served:
    process: subprocess.Popen[str]
    url: str
    store: str

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=Unverified(), timeout=60
        )

    def replicas(self) -> list[psutil.Process]:
        """The servers; the engine of each is its child."""
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "engine" in child.cmdline()]

    def command(self, *words: str) -> str:
        command = [sys.executable, "-m", "penstock.cli.main", *words, "--store", self.store]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    patience = Patience(timeout_s)
    while not condition():
        patience.look()
        time.sleep(0.05)


def engine_of(replica: psutil.Process) -> psutil.Process:
    (engine,) = (child for child in replica.children() if "penstock.cli.engine_process" in child.cmdline())
    return engine


def open_streams(replica: psutil.Process) -> int:
    ports = [c.laddr.port for c in replica.net_connections("tcp") if c.status == "LISTEN"]
    with urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/v1/penstock/snapshot", timeout=5) as answer:
        return int(json.load(answer)["num_open"])


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def ours() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if "penstock.cli.main" in child.cmdline()]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory: Path = tmp_path_factory.mktemp("gateway")
    store = f"sqlite:///{directory / 'tenants.db'}"
    others = set(ours())  # of tests before this one
    command = [sys.executable, "-m", "penstock.cli.main", "serve", "smollm2", "--replicas", "2", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--dtype", "float32"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PENSTOCK_STORE": store},
    )
    assert process.stdout is not None
    found = re.search(r"http://\S+:\d+", process.stdout.readline())
    assert found is not None
    served = Served(process, found.group(), store)
    until(lambda: is_ready(served.url))
    yield served
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert not set(ours()) - others


def text(client: openai.OpenAI, seed: int, at_token: Callable[[int], object] = lambda _: None) -> str:
    stream = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, temperature=0.9, seed=seed, max_tokens=60, stream=True
    )
    pieces: list[str] = []
    for chunk in stream:
        pieces.append(chunk.choices[0].delta.content or "")
        at_token(len(pieces))
    return "".join(pieces)


def all_ready(served: Served) -> bool:
    try:
        return len(served.replicas()) == 2 and all(open_streams(replica) >= 0 for replica in served.replicas())
    except (OSError, IndexError, psutil.Error):
        return False


@pytest.mark.parametrize("how", ["killed", "stopped", "engine stopped"])
def test_eight_streams_outlive_a_replica(served: Served, how: str) -> None:
    """The last kind answers all it is asked, but makes no token."""
    until(lambda: all_ready(served))
    client = served.client()
    expected = [text(client, seed) for seed in range(8)]
    found: dict[int, str] = {}
    half_way = threading.Barrier(9)

    def ask(seed: int) -> None:
        found[seed] = text(client, seed, lambda count: half_way.wait(60) if count == 12 else None)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    half_way.wait(60)
    victim = max(served.replicas(), key=open_streams)
    assert open_streams(victim) > 0
    hurt = engine_of(victim) if how == "engine stopped" else victim
    hurt.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    for thread in threads:
        thread.join(60)
    if how == "engine stopped":
        assert open_streams(victim) <= 1  # it still answers; the one is a deep probe
    if how != "killed":
        hurt.send_signal(signal.SIGCONT)
    assert [found[seed] for seed in range(8)] == expected


def is_let_in(client: openai.OpenAI) -> bool:
    try:
        client.models.list()
    except openai.AuthenticationError:
        return False
    return True


def test_a_tenants_key_works_from_its_creation_to_its_revocation(served: Served) -> None:
    served.command("tenants", "add", "acme", "--requests-per-minute", "600", "--max-output", "20")
    key = served.command("keys", "create", "acme")
    until(lambda: is_let_in(served.client(key)) and not is_let_in(served.client()))
    told = served.client(key).chat.completions.create(model="smollm2", messages=MESSAGES, max_tokens=5).usage
    assert told is not None

    def usage() -> list[dict[str, int]]:
        return list(json.loads(served.command("usage", "acme", "--json"))["usage"])

    until(lambda: len(usage()) == 1)
    (row,) = usage()
    assert (row["input_tokens"], row["output_tokens"]) == (told.prompt_tokens, told.completion_tokens)
    served.command("keys", "revoke", key.split("_")[1])
    until(lambda: not is_let_in(served.client(key)))


def test_a_tenants_prompts_are_counted_and_cached_for_it_alone(served: Served) -> None:
    prompt: Any = [{"role": "user", "content": "Größe: the river runs past the mill, 12345 stones, and on. " * 60}]
    keys = []
    for name in ("north", "south"):
        served.command("tenants", "add", name, "--max-input", "2000", "--tokens-per-minute", "60000")
        keys.append(served.command("keys", "create", name))
    until(lambda: all(is_let_in(served.client(key)) for key in keys))

    def ask(key: str) -> Any:
        return served.client(key).chat.completions.create(model="smollm2", messages=prompt, max_tokens=2).usage

    told = ask(keys[0])
    assert len(prompt[0]["content"]) > 2000 > told.prompt_tokens
    again = [ask(keys[0]) for _ in range(4)]  # of two replicas one has seen it
    assert max(found.prompt_tokens_details.cached_tokens for found in again) > 1000
    assert ask(keys[1]).prompt_tokens_details.cached_tokens == 0
    served.command("tenants", "set", "south", "--max-input", str(told.prompt_tokens - 1))

    def refusal() -> str:
        try:
            ask(keys[1])
        except openai.BadRequestError as refused:
            return refused.message
        return ""

    until(lambda: bool(refusal()))
    assert f"has {told.prompt_tokens} tokens" in refusal()
