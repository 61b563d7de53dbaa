"""One model served by penstock replicas and other engines at once, picked by the same score."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import openai
import pytest

from penstock.core.errors import ConfigError
from penstock.core.replica import ReplicaState
from penstock.gateway.membership.factory import replicas_of
from penstock.gateway.replicas.kv_sources import KvEventSettings
from penstock.gateway.settings.gateway import ModelSettings
from penstock.health.settings import HealthSettings
from penstock.health.slow_start import SlowStartSettings
from penstock.router.turns import observed_speed
from tests.clocks import ManualClock
from tests.dialects.servers import FakeSglang, FakeVllm
from tests.gateway.running import RunningGateway, running_gateway
from tests.server.replica import NAME, Replica, serving
from tests.waiting import GIVE_UP_S, eventually

# Who comes late starts at once: a slow start sends the next turn elsewhere, as it should.
QUICK = HealthSettings(probe_every_s=0.1, probe_timeout_s=1.0, slow_start=SlowStartSettings(ramp_s=0.01))
LONG = "the words of a long question about many things " * 60


def url_of(replica: Replica) -> str:
    return f"http://{replica.host}:{replica.port}"


def ask(gateway: RunningGateway, content: str, **options: Any) -> tuple[str, str]:
    """The replica that answered, and why it was picked."""
    answer = gateway.openai.chat.completions.with_raw_response.create(
        model=NAME, messages=[{"role": "user", "content": content}], **{"max_tokens": 3} | options
    )
    return answer.headers["x-penstock-replica"], answer.headers["x-penstock-route"]


def ask_when_idle(gateway: RunningGateway, content: str) -> tuple[str, str]:
    """It is asked when the gateway has heard that no replica works: one that computes a prompt is spared another."""
    replicas = gateway.app.replicas.values()
    eventually(lambda: [one.seen(gateway.clock.now()).sequences for one in replicas], lambda found: not any(found))
    return ask(gateway, content)


@contextlib.contextmanager
def fleet(*urls: str) -> Any:
    with running_gateway(pools={NAME: ModelSettings(replicas=list(urls))}, health=QUICK, waits=False) as gateway:
        replicas = gateway.app.replicas.values()
        eventually(
            lambda: all(one.snapshot.state is ReplicaState.READY and one.snapshot.share == 1 for one in replicas)
        )
        yield gateway


def test_penstock_vllm_and_sglang_share_one_models_requests() -> None:
    may_answer = threading.Event()

    class HeldVllm(FakeVllm):
        def answer(self, path: str, asked: dict[str, Any]) -> tuple[bool, list[bytes]]:
            may_answer.wait(GIVE_UP_S)
            return super().answer(path, asked)

    class HeldSglang(HeldVllm, FakeSglang):
        dialect = "sglang"
        documents = FakeSglang.documents

    with (
        serving() as own,
        HeldVllm(NAME) as vllm,
        HeldSglang(NAME) as sglang,
        fleet(url_of(own), vllm.url, sglang.url) as gateway,
    ):
        replicas = list(gateway.app.replicas.values())
        dialects = {one.upstream.dialect.name for one in replicas if one.upstream.dialect}
        assert dialects == {"vllm", "sglang"}
        pid = own.processes[-1].pid
        os.kill(pid, signal.SIGSTOP)  # nobody answers before all have been asked
        try:
            with ThreadPoolExecutor(40) as clients:
                answers = clients.map(lambda number: ask(gateway, f"question {number}", max_tokens=100), range(40))
                num_at = eventually(
                    lambda: {one.name: len(one.in_flight) for one in replicas}, lambda found: sum(found.values()) == 40
                )
                may_answer.set()
                os.kill(pid, signal.SIGCONT)
                where = Counter(replica for replica, _ in answers)
        finally:
            may_answer.set()
            os.kill(pid, signal.SIGCONT)
        assert min(num_at.values()) > 0  # no one of them is left out when there is more than the fastest can do
        assert where == num_at


def test_a_conversation_stays_where_its_beginning_is_whichever_engine_that_is() -> None:
    with serving() as own, FakeVllm(NAME) as vllm, fleet(url_of(own), vllm.url) as gateway:
        eventually(lambda: gateway.app.pools[NAME].tokens.prompt_tokenizer is not None)
        for topic in ("alpha ", "beta ", "gamma ", "delta "):
            homes = {ask_when_idle(gateway, topic + LONG + f"turn {turn}")[0] for turn in range(4)}
            assert len(homes) == 1
        _, why = ask_when_idle(gateway, "delta " + LONG + "again")
        assert ";matched=" in why


def test_a_model_without_a_tokenizer_is_routed_by_the_bytes_of_its_prompts() -> None:
    with FakeVllm(NAME) as one, FakeSglang(NAME) as other, fleet(one.url, other.url) as gateway:
        for topic in ("alpha ", "beta ", "gamma ", "delta "):
            first, _ = ask_when_idle(gateway, topic + LONG + "turn 0")
            second, why = ask_when_idle(gateway, topic + LONG + "turn 1")
            assert first == second
            assert ";matched=" in why
            assert ";approximate" in why


class Place(NamedTuple):
    host: str
    port: int


def test_a_stream_that_began_at_a_penstock_replica_goes_on_at_another_and_not_at_a_foreign_one() -> None:
    with serving(step_s=0.1) as slow, serving() as fast, FakeVllm(NAME) as vllm:
        pools = {NAME: ModelSettings(replicas=[url_of(slow), url_of(fast), vllm.url])}
        with running_gateway(pools=pools, health=QUICK, clock=ManualClock()) as gateway:
            others = [fast, Place("127.0.0.1", vllm.port)]
            for other in others:
                gateway.set_in_use(other, False)
            whole = "".join(_streamed(fast.openai))
            answer = gateway.openai.chat.completions.with_raw_response.create(**_question())
            began_at = gateway.app.replicas[url_of(slow)]
            assert answer.headers["x-penstock-replica"] == began_at.name
            text = []
            for number, chunk in enumerate(answer.parse()):
                text += [choice.delta.content or "" for choice in chunk.choices]
                if number == 3:
                    for other in others:
                        gateway.set_in_use(other, True)
                    gateway.call(began_at.send_away)
            assert "".join(text) == whole
            assert vllm.asked == []


def _question() -> dict[str, Any]:
    return {
        "model": NAME,
        "messages": [{"role": "user", "content": "the first and the second"}],
        "max_tokens": 60,
        "stream": True,
        "seed": 7,
        "temperature": 1.0,
    }


def _streamed(client: openai.OpenAI) -> list[str]:
    chunks = client.chat.completions.create(**_question())
    return [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]


class _PriorityVllm(FakeVllm):
    policy = "priority"


def test_another_engines_cache_is_salted_for_each_tenant_and_told_its_class_only_where_it_shall_be() -> None:
    pool = {"served_as": NAME, "send_priority": True}
    with (
        _PriorityVllm(NAME) as vllm,
        running_gateway(pools={NAME: ModelSettings(replicas=[vllm.url], **pool)}, health=QUICK, waits=False) as gateway,
    ):
        eventually(lambda: all(one.snapshot.state is ReplicaState.READY for one in gateway.app.replicas.values()))
        for tenant, priority in (("acme", "interactive"), ("zeta", "batch")):
            client = gateway.client(gateway.add_tenant(tenant, priority=priority))
            client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "hello"}], max_tokens=3)
        bodies = [body for path, body, _ in vllm.asked if path == "/v1/chat/completions"]
        salts = [body["cache_salt"] for body in bodies]
        assert len(set(salts)) == 2
        assert [body["priority"] for body in bodies] == sorted(body["priority"] for body in bodies)
        assert bodies[0]["priority"] < 0 < bodies[1]["priority"]  # vLLM runs the lower number first


def test_a_client_that_leaves_another_engines_stream_is_billed_for_what_it_got() -> None:
    with FakeVllm(NAME, token_s=0.05) as vllm, fleet(vllm.url) as gateway:
        question = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 500}
        stream = gateway.openai.chat.completions.create(**question, stream=True)
        assert any(chunk.choices[0].delta.content for chunk in stream)
        stream.close()
        eventually(lambda: bool(gateway.ledger.usages))
        (usage,) = gateway.ledger.usages
        assert 1 <= usage.output_tokens < 10  # and not all that it might have got


def test_a_server_that_will_not_hear_of_priorities_is_told_of_none_again_and_no_client_is_blamed() -> None:
    with (
        FakeVllm(NAME) as vllm,
        running_gateway(pools={NAME: ModelSettings(replicas=[vllm.url], send_priority=True)}, waits=False) as gateway,
    ):
        eventually(lambda: all(one.snapshot.state is ReplicaState.READY for one in gateway.app.replicas.values()))
        client = gateway.client(gateway.add_tenant("acme", priority="interactive"))
        question: Any = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        with pytest.raises(openai.InternalServerError) as caught:  # which a client tries again
            client.chat.completions.create(**question)
        assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (503, "1")
        for _ in range(2):
            assert client.chat.completions.create(**question).choices[0].message.content
        with pytest.raises(openai.BadRequestError):  # what is the client's fault stays so
            client.chat.completions.create(**question, extra_body={"priority": 1})


def test_how_fast_a_server_is_that_does_not_say_is_learnt_from_its_streams() -> None:
    class Slow(FakeSglang):
        """It takes half a second for an answer, by the gateway's clock."""

        def answer(self, path: str, asked: dict[str, Any]) -> tuple[bool, list[bytes]]:
            gateway.advance(0.5)
            return super().answer(path, asked)

    with FakeSglang(NAME) as fast, Slow(NAME) as slow:
        pools = {NAME: ModelSettings(replicas=[fast.url, slow.url])}
        with running_gateway(pools=pools, health=QUICK, clock=ManualClock()) as gateway:
            both = [Place("127.0.0.1", server.port) for server in (fast, slow)]
            asked: Any = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "stream": True}
            for one, other in (both, both[::-1]):
                gateway.set_in_use(one, True)
                gateway.set_in_use(other, False)
                with gateway.openai.chat.completions.with_streaming_response.create(**asked) as answer:
                    answer.read()  # to the end in form, which who reads events does not wait for
                eventually(gateway.is_idle)
            for one in both:  # what was learnt is seen when the replica is looked at
                gateway.set_in_use(one, True)
            seen = {one.id: one for one in gateway.app.admission.replicas(NAME)}
            assert seen[slow.url].prefill_tokens_per_s < 100.0 < seen[fast.url].prefill_tokens_per_s
            assert observed_speed(seen[slow.url]) < observed_speed(seen[fast.url])  # what the weighted strategy goes by


def test_kv_events_are_not_waited_for_where_a_dialect_has_none() -> None:
    own = ModelSettings(replicas=["http://a:1"], served_as="m", dialect="llamacpp", kv_events=KvEventSettings())
    with pytest.raises(ConfigError, match="llamacpp publishes no KV events"):
        replicas_of({"m": own})
