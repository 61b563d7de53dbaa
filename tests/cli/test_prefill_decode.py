"""A gateway in front of real replicas of which one computes prompts and two answer them. Each answer is the one that a
single replica gives, whoever is lost meanwhile, and nothing is left behind on any of them."""

from __future__ import annotations

import contextlib
import json
import signal
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import Any

import openai
import pytest
from openai.types import Completion, CompletionUsage
from tools.drills.pressure import samples
from tools.drills.stand import MODEL, PATIENT, Process, Stand, stand

from tests.sdk import Unverified
from tests.template import engine_of
from tests.waiting import eventually

pytestmark = pytest.mark.slow

_FLAGS = ("--kv-port", "0", "--max-num-seqs", "8", "--speculate", "off")


@dataclass
class Fleet:
    place: Stand
    prefill: Process
    decodes: list[Process]
    gateway: Process
    dice: Random = field(default_factory=lambda: Random(7))

    def prompt(self) -> list[int]:
        """One that nobody has seen, of several routing blocks."""
        return [self.dice.randrange(3, 500) for _ in range(self.dice.randrange(600, 1500))]

    @property
    def replicas(self) -> list[Process]:
        return [self.prefill, *self.decodes]

    def _seen(self, name: str) -> list[str]:
        """As the gateway sees them."""
        seen = {one["id"]: one[name] for one in self.gateway.get("/admin/v1/replicas")["replicas"]}
        return [seen[one.url] for one in self.replicas]

    def roles(self) -> list[str]:
        return self._seen("role")

    def states(self) -> list[str]:
        return self._seen("state")

    def settle(self) -> None:
        """Nobody works, and nobody holds a block."""
        eventually(self.gateway.known_work, lambda found: not any(found))
        for one in self.replicas:
            eventually(
                lambda one=one: (number(one, "penstock_kv_usage_ratio"), one.num_open()), lambda found: not any(found)
            )


def call(server: Process, method: str, path: str, body: object = None) -> None:
    content = json.dumps(body).encode() if body is not None else b""
    asked = urllib.request.Request(server.url + path, content, {"content-type": "application/json"}, method=method)
    with urllib.request.urlopen(asked, timeout=60):
        pass


def number(server: Process, name: str, **labels: str) -> float:
    found = (sample for sample in samples(server) if sample.name == name)
    return sum(sample.value for sample in found if labels.items() <= sample.labels.items())


def stream(server: Process, prompt: list[int], tokens: int) -> Iterator[Completion]:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=Unverified())
    asked: dict[str, Any] = {"stream_options": {"include_usage": True}, "extra_body": {"ignore_eos": True}}
    return iter(
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=tokens, temperature=0, stream=True, **asked)
    )


def text_of(chunks: Iterable[Completion]) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


def answer(server: Process, prompt: list[int], tokens: int = 24) -> tuple[str, CompletionUsage]:
    chunks = list(stream(server, prompt, tokens))
    assert chunks[-1].usage is not None
    return text_of(chunks), chunks[-1].usage


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with stand(tmp_path_factory.mktemp("fleet"), context=4096) as place:
        prefill, *decodes = (place.replica("--role", role, *_FLAGS) for role in ("prefill", "decode", "decode"))
        eventually(lambda: [one.is_ready() for one in (prefill, *decodes)], all)
        pool = {"replicas": [one.url for one in (prefill, *decodes)], "split": "always"}
        gateway = place.gateway(prefill, *decodes, models={MODEL: pool}, **PATIENT)
        eventually(lambda: number(gateway, "penstock_gateway_replica_kv_exact"), lambda exact: exact == 3)
        yield Fleet(place, prefill, decodes, gateway)
        assert place.complaints() == []


@contextlib.contextmanager
def fault(replica: Process, number: signal.Signals) -> Iterator[None]:
    """Something happens to its engine; it is as before afterwards."""
    engine = engine_of(replica.pid)
    engine.send_signal(number)
    yield
    if number is signal.SIGSTOP:
        engine.send_signal(signal.SIGCONT)
    eventually(replica.is_ready)


def test_each_answer_is_that_of_one_replica_and_is_billed_once(fleet: Fleet) -> None:
    prompts = [fleet.prompt() for _ in range(6)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda prompt: answer(fleet.gateway, prompt), prompts))
    pulled = sum(number(one, "penstock_kv_pulled_tokens_total") for one in fleet.decodes)
    assert pulled >= sum(map(len, prompts)) - 32 * len(prompts)  # all but their last blocks
    assert number(fleet.gateway, "penstock_gateway_kv_sources_total", reason="prefill") == len(prompts)
    assert number(fleet.prefill, "penstock_kv_lent_tokens_total") == pulled
    for prompt, (text, usage) in zip(prompts, found, strict=True):
        assert text == answer(fleet.prefill, prompt)[0]
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 24)
        assert usage.prompt_tokens_details is not None
        assert not usage.prompt_tokens_details.cached_tokens  # computed for it, if elsewhere
    fleet.settle()


@pytest.mark.parametrize("lost", ["prefill", "decode"])
def test_a_replica_that_is_killed_changes_no_answer(fleet: Fleet, lost: str) -> None:
    prompts = [fleet.prompt() for _ in range(6)]
    victim = fleet.prefill if lost == "prefill" else fleet.decodes[0]
    waiting = fleet.decodes if lost == "prefill" else [victim]  # whoever has requests that need the victim
    engine = engine_of(victim.pid)
    with ThreadPoolExecutor(3) as pool:
        engine.suspend()  # so that it cannot be done before it is killed
        asked = [pool.submit(answer, fleet.gateway, prompt, 100) for prompt in prompts]
        eventually(lambda: [one.num_open() for one in waiting], any)
        engine.kill()
        found = [one.result()[0] for one in asked]
    eventually(victim.is_ready)
    assert found == [answer(fleet.decodes[1], prompt, 100)[0] for prompt in prompts]
    fleet.settle()


def test_a_stream_of_a_replica_that_drains_takes_its_kv_along(fleet: Fleet) -> None:
    prompt = fleet.prompt()[:600]
    chunks = stream(fleet.gateway, prompt, 3000)
    begun = next(chunks)
    [drained], [other] = ([one for one in fleet.decodes if bool(one.num_open()) is has] for has in (True, False))
    before = number(other, "penstock_kv_pulled_tokens_total")
    call(drained, "POST", "/v1/penstock/drain")
    found = text_of([begun, *chunks])
    assert number(fleet.gateway, "penstock_gateway_kv_sources_total", reason="moved") == 1
    assert number(other, "penstock_kv_pulled_tokens_total") >= before + len(prompt)
    call(drained, "DELETE", "/v1/penstock/drain")
    eventually(fleet.states, lambda states: set(states) == {"ready"})
    assert found == answer(fleet.prefill, prompt, 3000)[0]
    fleet.settle()


def test_replicas_change_their_roles_while_they_run(fleet: Fleet) -> None:
    before, lender = fleet.roles(), fleet.decodes[1]
    for one, role in ((lender, "prefill"), (fleet.prefill, "decode")):
        call(one, "POST", "/v1/penstock/role", {"role": role})
    eventually(fleet.roles, lambda roles: roles == ["decode", "decode", "prefill"])
    prompts = [fleet.prompt() for _ in range(3)]
    found = [answer(fleet.gateway, prompt)[0] for prompt in prompts]
    assert number(lender, "penstock_kv_lent_tokens_total") >= sum(map(len, prompts)) - 32 * len(prompts)
    assert found == [answer(lender, prompt)[0] for prompt in prompts]
    for one, role in zip(fleet.replicas, before, strict=True):
        call(one, "POST", "/v1/penstock/role", {"role": role})
    eventually(fleet.roles, lambda roles: roles == before)
    fleet.settle()


@pytest.mark.drill
def test_random_faults_under_random_traffic_change_no_answer(fleet: Fleet) -> None:
    """A replica that answers and stands still is the gateway's to notice, which takes nobody for hung here."""
    dice = Random(11)
    faults = [(one, signal.SIGKILL) for one in fleet.replicas] + [(fleet.prefill, signal.SIGSTOP)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(12):
            prompts = [fleet.prompt() for _ in range(dice.randrange(2, 7))]
            asked = [pool.submit(answer, fleet.gateway, prompt, 60) for prompt in prompts]
            eventually(lambda: any(one.num_open() for one in fleet.decodes))
            victim, number = dice.choice(faults)
            with fault(victim, number):
                found = [one.result()[0] for one in asked]
            assert found == [answer(fleet.decodes[1], prompt, 60)[0] for prompt in prompts]
            fleet.settle()
