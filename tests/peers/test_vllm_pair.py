"""Two real vLLMs on the CPU with NixlConnector: one computes prompts, the other pulls their KV and answers."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import pytest

from penstock.dialects import exposition, handover
from tests.gateway.pairs import BLOCKS, PairedVllm, handovers, in_front_of
from tests.gateway.running import RunningGateway
from tests.peers.peers import Starting, checkpoint, free_port, starting_vllm
from tests.waiting import eventually

pytestmark = pytest.mark.slow

_CONNECTOR = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}'
_UCX = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "NIXL_LOG_LEVEL": "WARN"}
_PULLED = "vllm:external_prefix_cache_hits_total"


def prompt(topic: str) -> str:
    """Of several of vLLM's blocks, which have 128 tokens on a CPU."""
    return " ".join(f"{topic} {number} is here." for number in range(60))


@dataclass
class Vllm(Starting):
    dialect: ClassVar[str] = "vllm"

    def complete(self, body: bytes) -> bytes:
        asked = urllib.request.Request(f"{self.url}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=300) as answer:
            found: bytes = answer.read()
            return found

    def text(self, topic: str) -> str:
        return str(json.loads(self.complete(request(topic)))["choices"][0]["text"])

    @property
    def pulled_tokens(self) -> float:
        """Tokens whose KV it went to another server for."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            [(_, found)] = exposition.samples(answer.read(), (_PULLED,))[_PULLED]
        return found


def request(topic: str) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt(topic), "max_tokens": 6, "temperature": 0}).encode()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Vllm, Vllm]]:
    home = tmp_path_factory.mktemp("vllms")
    model = checkpoint(home)
    with ExitStack() as stack:
        started = []
        for core in range(2):  # one each: threads that wait for each other would wait for the other server's too
            side_channel = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
            server = starting_vllm(
                model, home / f"log{core}", "--kv-transfer-config", _CONNECTOR, cores=str(core), **_UCX, **side_channel
            )
            started.append(Vllm(**vars(stack.enter_context(server))))
        for one in started:
            one.wait()
        yield started[0], started[1]


def asked(gateway: RunningGateway, topic: str) -> str:
    stream = gateway.openai.completions.create(
        model="m", prompt=prompt(topic), max_tokens=6, temperature=0, stream=True
    )
    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


def test_vllm_hands_out_what_the_fakes_of_it_do(pair: tuple[Vllm, Vllm]) -> None:
    p, d = pair
    params = handover.params_in(p.complete(handover.prefill_request(request("Roads"))))
    assert params is not None
    assert json.loads(bytes(params)).keys() >= BLOCKS.keys()
    before = d.pulled_tokens
    found = json.loads(d.complete(handover.with_params(request("Roads"), params)))
    assert found["choices"][0]["text"] == p.text("Roads")
    eventually(lambda: d.pulled_tokens, lambda now: now > before)


def test_one_vllm_answers_with_the_kv_that_another_has_computed(pair: tuple[Vllm, Vllm]) -> None:
    p, d = pair
    before = d.pulled_tokens
    with in_front_of((p, "prefill"), (d, "decode")) as gateway:
        found = asked(gateway, "Rivers")
        assert handovers(gateway, "handed_over")
        assert not handovers(gateway, "not_pulled")
    assert found == p.text("Rivers")
    eventually(lambda: d.pulled_tokens, lambda now: now > before)


def test_a_vllm_that_cannot_pull_computes_alone(pair: tuple[Vllm, Vllm]) -> None:
    """Who handed over is gone, or never was: a fake that names blocks which nobody has."""
    _, d = pair
    with PairedVllm() as gone, in_front_of((gone, "prefill"), (d, "decode")) as gateway:
        assert asked(gateway, "Clouds") == d.text("Clouds")
        assert handovers(gateway, "not_pulled")


def test_a_vllm_without_the_other_computes_alone(pair: tuple[Vllm, Vllm]) -> None:
    p, d = pair
    expected, before = p.text("Stones"), d.pulled_tokens
    with in_front_of((p, "prefill"), (d, "decode")) as gateway:
        p.process.terminate()
        p.process.wait()
        assert asked(gateway, "Stones") == expected
    assert d.pulled_tokens == before
