"""`penstock serve MODEL --replicas 2` as a user starts it: keys by command, streams that outlive their replicas."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tools.drills import survival
from tools.drills.call import Call
from tools.drills.stand import MODEL, write_model

from penstock.api.relay import SECRET_HEADER, SECRET_VARIABLE
from tests.children import children
from tests.sdk import Unverified
from tests.template import engine_of
from tests.waiting import eventually

pytestmark = pytest.mark.slow

MESSAGES: Any = [{"role": "user", "content": "Tell me of a river."}]
CONTEXT = 1 << 16
STREAMS = 8


@dataclass
class Served:
    process: subprocess.Popen[str]
    url: str
    store: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=Unverified(), timeout=60
        )

    def replicas(self) -> list[psutil.Process]:
        """The servers. Their engines and they are children of the template."""
        return children(self.process.pid, "engine")

    def ports(self) -> tuple[list[int], list[int]]:
        """Ports of the replicas that the gateway finds ready, and those where servers listen."""
        with urllib.request.urlopen(f"{self.url}/admin/v1/replicas", timeout=60) as answer:
            ready = [one["id"] for one in json.load(answer)["replicas"] if one["state"] == "ready"]
        return sorted(int(url.rpartition(":")[2]) for url in ready), sorted(map(port_of, self.replicas()))

    def num_carried_on(self) -> float:
        """Streams so far that went on at another replica."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            samples = [sample for family in families for sample in family.samples]
        return sum(one.value for one in samples if one.name == "penstock_gateway_streams_carried_on_total")

    def command(self, *words: str) -> str:
        command = [sys.executable, "-m", "penstock.cli.main", *words, "--store", self.store]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def port_of(replica: psutil.Process) -> int:
    """0: it does not listen yet, or no longer."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return next((c.laddr.port for c in replica.net_connections("tcp") if c.status == "LISTEN"), 0)
    return 0


def open_streams(replica: psutil.Process) -> int:
    known = {SECRET_HEADER: replica.environ()[SECRET_VARIABLE]}
    asked = urllib.request.Request(f"http://127.0.0.1:{port_of(replica)}/v1/penstock/snapshot", headers=known)
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return int(json.load(answer)["num_open"])


def ours() -> list[psutil.Process]:
    return children(None, "penstock.cli.main")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory: Path = tmp_path_factory.mktemp("gateway")
    store = f"sqlite:///{directory / 'tenants.db'}"
    others = set(ours())  # of tests before this one
    model = write_model(directory / MODEL, CONTEXT)
    command = [sys.executable, "-m", "penstock.cli.main", "serve", str(model), "--replicas", "2", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--load", "dummy", "--dtype", "float32"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PENSTOCK_STORE": store},
    )
    assert process.stdout is not None
    found = re.search(r"http://\S+:\d+", process.stdout.readline())
    assert found is not None
    served = Served(process, found.group(), store)
    eventually(served.ports, are_ready)
    yield served
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert not set(ours()) - others


def test_serve_says_what_it_runs_and_how_to_try_it(served: Served) -> None:
    assert served.process.stdout is not None
    lines: list[str] = []
    while not lines or not lines[-1].startswith("2 of 2 replicas ready in"):
        lines.append(served.process.stdout.readline())
        assert lines[-1], "".join(lines)
    said = "".join(lines)
    assert f"penstock serves {MODEL} at {served.url}   (1 of 2 replicas ready in" in said
    assert re.search(r"^  replicas +2 behind a gateway", said, re.MULTILINE)
    assert re.search(rf"^  max_model_len +{CONTEXT}$", said, re.MULTILINE)
    assert f"  curl -N {served.url}/v1/chat/completions -d '{{" in said


def are_ready(ports: tuple[list[int], list[int]]) -> bool:
    ready, listening = ports
    return len(ready) == 2 and ready == listening


@pytest.mark.parametrize("how", ["engine stopped", "stopped", "killed"])
async def test_eight_streams_outlive_a_replica(served: Served, how: str) -> None:
    """The first kind answers all it is asked, but makes no token."""
    tokens = 400
    while not await are_carried_on(served, how, tokens):
        tokens *= 2  # they had ended before it happened
        assert tokens < CONTEXT


async def are_carried_on(served: Served, how: str, tokens: int) -> bool:
    """Whether a stream was left to be carried on when a replica was hurt. Every one must be as on a quiet day."""
    expected = await survival.undisturbed(served.port, STREAMS, tokens)
    before = served.num_carried_on()
    hurt: list[tuple[psutil.Process, psutil.Process]] = []

    async def hurt_the_busiest(calls: list[Call]) -> list[int]:
        await survival.all_at(calls, 12)
        victim = max(served.replicas(), key=open_streams)
        hurt.append((victim, engine_of(victim.pid) if how == "engine stopped" else victim))
        hurt[0][1].send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        return []

    report = await survival.drill(served.port, expected, tokens, hurt_the_busiest)
    [(victim, process)] = hurt
    if how == "engine stopped":
        # It still answers, and hears that its clients have gone. The one is a deep probe.
        await asyncio.to_thread(eventually, lambda: open_streams(victim), lambda number: number <= 1)
    if how != "killed":
        process.send_signal(signal.SIGCONT)
    assert report.wrong == []
    await asyncio.to_thread(eventually, served.ports, are_ready)
    assert (victim in served.replicas()) == (how != "killed")  # another process has taken its place
    return served.num_carried_on() > before


def is_let_in(client: openai.OpenAI) -> bool:
    try:
        client.models.list()
    except openai.AuthenticationError:
        return False
    return True


def test_a_tenants_key_works_from_its_creation_to_its_revocation(served: Served) -> None:
    served.command("tenants", "add", "acme", "--requests-per-minute", "600", "--max-output", "20")
    key = served.command("keys", "create", "acme")
    eventually(lambda: [is_let_in(served.client(one)) for one in (key, "none")], lambda seen: seen == [True, False])
    told = served.client(key).chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5).usage
    assert told is not None

    def usage() -> list[dict[str, int]]:
        return list(json.loads(served.command("usage", "acme", "--json"))["usage"])

    (row,) = eventually(usage, lambda rows: len(rows) == 1)
    assert (row["input_tokens"], row["output_tokens"]) == (told.prompt_tokens, told.completion_tokens)
    served.command("keys", "revoke", key.split("_")[1])
    eventually(lambda: not is_let_in(served.client(key)))


def test_a_tenants_prompts_are_counted_and_cached_for_it_alone(served: Served) -> None:
    prompt: Any = [{"role": "user", "content": "Größe: the river runs past the mill, 12345 stones, and on. " * 60}]
    keys = []
    for name in ("north", "south"):
        served.command("tenants", "add", name, "--max-input", "3000", "--tokens-per-minute", "6000000")
        keys.append(served.command("keys", "create", name))
    eventually(lambda: all(is_let_in(served.client(key)) for key in keys))

    def ask(key: str) -> Any:
        return served.client(key).chat.completions.create(model=MODEL, messages=prompt, max_tokens=2).usage

    def usage_or_refusal(key: str) -> Any:
        try:
            return ask(key)
        except openai.BadRequestError as refused:
            return refused.message

    # Before it has the tokenizer, the gateway can only guess.
    told = eventually(lambda: usage_or_refusal(keys[0]), lambda answer: not isinstance(answer, str))
    assert len(prompt[0]["content"]) > 3000 > told.prompt_tokens
    again = [ask(keys[0]) for _ in range(4)]  # of two replicas one has seen it
    assert max(found.prompt_tokens_details.cached_tokens for found in again) > 1000
    assert ask(keys[1]).prompt_tokens_details.cached_tokens == 0
    served.command("tenants", "set", "south", "--max-input", str(told.prompt_tokens - 1))

    def refusal() -> str:
        answer = usage_or_refusal(keys[1])
        return answer if isinstance(answer, str) else ""

    assert f"has {told.prompt_tokens} tokens" in eventually(refusal)
