"""Prompts that one vLLM or SGLang server computes and another answers."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from penstock.router.strategies import RoutingSettings
from tests.clocks import ManualClock
from tests.dialects.servers import PROMPT_TOKENS
from tests.gateway.pairs import (
    BLOCKS,
    TO_PREFILL,
    PairedSglang,
    PairedVllm,
    Rooms,
    handovers,
    in_front_of,
)
from tests.gateway.running import RunningGateway
from tests.waiting import eventually

PROMPT = "the water falls from the mountain into the valley"


def whole_text_of(gateway: RunningGateway) -> str:
    return gateway.openai.completions.create(model="m", prompt=PROMPT, max_tokens=4).choices[0].text


def text_of(gateway: RunningGateway, **options: Any) -> str:
    stream = gateway.openai.completions.create(model="m", prompt=PROMPT, stream=True, **{"max_tokens": 4} | options)
    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


@pytest.fixture
def vllms() -> Iterator[tuple[PairedVllm, PairedVllm]]:
    with PairedVllm() as p, PairedVllm() as d:
        assert isinstance(p, PairedVllm)
        assert isinstance(d, PairedVllm)
        yield p, d
        p.may_answer.set()


def test_vllm_computes_a_prompt_and_another_is_told_where_its_blocks_are(vllms: tuple[PairedVllm, PairedVllm]) -> None:
    p, d = vllms
    with in_front_of((p, "prefill"), (d, "decode")) as gateway:
        assert text_of(gateway, extra_body={"min_tokens": 3}) == "The quick brown fox"
        [first], [second] = p.prompts, d.prompts
        assert first["kv_transfer_params"] == TO_PREFILL
        assert (first["max_tokens"], first["min_tokens"], first["stream"]) == (1, 1, False)
        assert second["kv_transfer_params"] == BLOCKS
        assert (second["max_tokens"], second["min_tokens"], second["stream"]) == (4, 3, True)
        assert first["prompt"] == second["prompt"]
        assert first["cache_salt"] == second["cache_salt"]
        assert p.ids == d.ids
        assert p.ids[0]
        assert handovers(gateway, "handed_over")
        [used] = eventually(lambda: gateway.ledger.usages)
        assert (used.input_tokens, used.output_tokens) == (PROMPT_TOKENS, 4)


def test_a_whole_chat_is_shared_too(vllms: tuple[PairedVllm, PairedVllm]) -> None:
    p, d = vllms
    with in_front_of((p, "prefill"), (d, "both")) as gateway:
        found = gateway.openai.chat.completions.create(
            model="m", messages=[{"role": "user", "content": PROMPT}], max_completion_tokens=2
        )
        assert found.choices[0].message.content == "The quick"
        assert p.prompts[0]["max_completion_tokens"] == p.prompts[0]["max_tokens"] == 1
        assert d.prompts[0]["kv_transfer_params"] == BLOCKS


@pytest.mark.parametrize(
    "asked", [{"n": 2}, {"echo": True}, {"prompt": ["one", "two"]}], ids=["answers", "echo", "prompts"]
)
def test_what_two_vllms_cannot_share_one_computes(vllms: tuple[PairedVllm, PairedVllm], asked: dict[str, Any]) -> None:
    p, d = vllms
    with in_front_of((p, "prefill"), (d, "decode")) as gateway:
        gateway.openai.completions.create(model="m", **{"prompt": PROMPT, "max_tokens": 2} | asked)
        assert p.prompts == []
        assert "kv_transfer_params" not in d.prompts[0]
        assert handovers(gateway, "not_shared")


@pytest.mark.parametrize("garbage", [b"{}", b"[1", b'{"kv_transfer_params":7}', b'{"kv_transfer_params":{}}'])
def test_without_parameters_the_other_vllm_computes_alone(
    vllms: tuple[PairedVllm, PairedVllm], garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = vllms
    p.garbage = garbage
    with in_front_of((p, "prefill"), (d, "decode")) as gateway:
        assert text_of(gateway) == "The quick brown fox"
        assert "kv_transfer_params" not in d.prompts[0]
        assert handovers(gateway, "no_params")
        assert "hands no prompts of m over: no_params" in caplog.text


@pytest.mark.parametrize("asking", [text_of, whole_text_of])
def test_a_vllm_that_cannot_pull_what_another_handed_over_computes_it(
    vllms: tuple[PairedVllm, PairedVllm], asking: Callable[[RunningGateway], str]
) -> None:
    p, d = vllms
    d.can_pull = False
    with in_front_of((p, "prefill"), (d, "decode")) as gateway:
        assert asking(gateway) == "The quick brown fox"
        assert [asked.get("kv_transfer_params") for asked in d.prompts] == [BLOCKS, None]
        assert handovers(gateway, "handed_over")
        assert handovers(gateway, "not_pulled")
        assert not gateway.app.replicas[d.url].snapshot.is_tripped


def test_a_vllm_that_is_gone_computes_no_prompts_and_the_other_does(vllms: tuple[PairedVllm, PairedVllm]) -> None:
    p, d = vllms
    with in_front_of((p, "prefill"), (d, "decode")) as gateway:
        replica = gateway.app.replicas[p.url]
        seen = replica.snapshot
        p.kill()
        # Nobody has noticed yet: the router is told what it was told last.
        gateway.call(lambda: gateway.app.admission.replica_changed(seen))
        assert text_of(gateway) == "The quick brown fox"
        assert "kv_transfer_params" not in d.prompts[0]


def test_a_vllm_that_takes_too_long_is_not_waited_for(vllms: tuple[PairedVllm, PairedVllm]) -> None:
    p, d = vllms
    p.may_answer.clear()
    with in_front_of((p, "prefill"), (d, "decode"), clock=ManualClock()) as gateway:
        found: list[str] = []
        asking = threading.Thread(target=lambda: found.append(text_of(gateway)))
        asking.start()
        eventually(lambda: p.prompts)
        gateway.advance(60.0)
        asking.join()
        assert found == ["The quick brown fox"]
        assert "kv_transfer_params" not in d.prompts[0]
        assert handovers(gateway, "slow")


def test_a_client_that_leaves_between_the_legs_leaves_nothing_behind(vllms: tuple[PairedVllm, PairedVllm]) -> None:
    p, d = vllms
    p.may_answer.clear()
    with in_front_of((p, "prefill"), (d, "decode")) as gateway:
        body = json.dumps({"model": "m", "prompt": PROMPT, "max_tokens": 4}).encode()
        named = {"host": "localhost", "content-type": "application/json", "content-length": len(body)}
        head = "\r\n".join(["POST /v1/completions HTTP/1.1", *(f"{name}: {value}" for name, value in named.items())])
        with socket.create_connection(("127.0.0.1", urlsplit(gateway.url).port or 0)) as client:
            client.sendall(head.encode() + b"\r\n\r\n" + body)
            eventually(lambda: p.prompts)
        assert len(p.prompts) == 1
        eventually(gateway.is_idle)
        p.may_answer.set()
        assert d.prompts == []


def test_when_the_vllm_that_answers_is_gone_another_does(vllms: tuple[PairedVllm, PairedVllm]) -> None:
    p, d = vllms
    with PairedVllm() as other, in_front_of((p, "prefill"), (d, "decode"), (other, "decode")) as gateway:
        assert isinstance(other, PairedVllm)
        p.may_answer.clear()
        found: list[str] = []
        asking = threading.Thread(target=lambda: found.append(text_of(gateway)))
        asking.start()
        eventually(lambda: p.prompts)
        picked = next(one for one in (d, other) if gateway.app.replicas[one.url].in_flight)
        picked.kill()
        p.may_answer.set()
        asking.join()
        assert found == ["The quick brown fox"]
        assert len(p.prompts) in (1, 2)  # again for the other, if it is asked to


@contextlib.contextmanager
def sglangs(num_prefills: int = 1) -> Iterator[tuple[list[PairedSglang], PairedSglang]]:
    rooms = Rooms()
    with contextlib.ExitStack() as stack:
        prefills = [PairedSglang(mode="prefill", rooms=rooms) for _ in range(num_prefills)]
        decode = PairedSglang(rooms=rooms)
        for one in (*prefills, decode):
            stack.enter_context(one)
        yield prefills, decode
        for room in rooms.opened.values():
            room.set()


def rooms_of(server: PairedSglang) -> list[dict[str, Any]]:
    return [
        {name: asked.get(name) for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room")}
        for _, asked, _ in server.asked
    ]


def test_two_sglangs_meet_in_a_room() -> None:
    with sglangs() as ([p], d), in_front_of((p, "prefill"), (d, "decode"), bootstrap_port=9001) as gateway:
        assert text_of(gateway) == "The quick brown fox"
        assert rooms_of(p) == rooms_of(d)
        [room] = rooms_of(p)
        assert (room["bootstrap_host"], room["bootstrap_port"]) == ("127.0.0.1", 9001)
        assert text_of(gateway) == "The quick brown fox"
        assert rooms_of(p)[1]["bootstrap_room"] != room["bootstrap_room"]
        used = eventually(lambda: gateway.ledger.usages, lambda found: len(found) == 2)
        assert [(one.input_tokens, one.output_tokens) for one in used] == [(PROMPT_TOKENS, 4)] * 2


def test_sglangs_share_every_request_whatever_the_setting_says_and_each_of_several_prompts_has_a_room() -> None:
    with sglangs() as ([p], d), in_front_of((p, "prefill"), (d, "decode")) as gateway:
        router = gateway.app.admission.router
        gateway.call(lambda: router.configure(RoutingSettings(), {}, {"m": "never"}))
        gateway.openai.completions.create(model="m", prompt=["a", "b"], max_tokens=1)
        [room] = rooms_of(d)
        assert rooms_of(p) == [room]
        assert len(set(room["bootstrap_room"])) == 2
        with pytest.raises(openai.BadRequestError, match="compute prompts apart"):
            gateway.openai.completions.create(model="m", prompt=["a", "b"], n=2, max_tokens=1)


def test_when_sglangs_prefill_fails_the_same_server_answers_with_another() -> None:
    with (
        sglangs(2) as ([one, two], d),
        in_front_of((one, "prefill"), (two, "prefill"), (d, "decode")) as gateway,
    ):
        d.rooms.num_failures = 1
        assert text_of(gateway) == "The quick brown fox"
        assert len(one.asked) == len(two.asked) == 1
        assert len(d.asked) == 2
        assert not gateway.app.replicas[d.url].snapshot.is_tripped  # it was not its fault


@pytest.mark.parametrize("asking", [text_of, whole_text_of])
def test_when_the_sglang_that_decodes_is_the_first_to_notice_that_a_prefill_fails_another_is_tried(
    asking: Callable[[RunningGateway], str],
) -> None:
    with (
        sglangs(2) as ([one, two], d),
        in_front_of((one, "prefill"), (two, "prefill"), (d, "decode")) as gateway,
        ThreadPoolExecutor(1) as pool,
    ):
        d.rooms.num_failures, d.rooms.noticed = 1, threading.Event()
        asked = pool.submit(asking, gateway)
        eventually(lambda: d.num_refused)
        d.rooms.noticed.set()
        assert asked.result() == "The quick brown fox"
        assert len(one.asked) == len(two.asked) == 1
        assert not gateway.app.replicas[d.url].snapshot.is_tripped  # it was not its fault


def test_an_error_of_the_sglang_that_decodes_is_its_own_if_the_prefill_goes_on() -> None:
    with (
        sglangs() as ([p], d),
        in_front_of((p, "prefill"), (d, "decode"), clock=ManualClock()) as gateway,
        ThreadPoolExecutor(1) as pool,
    ):
        d.rooms.num_failures, d.rooms.noticed = 1, threading.Event()
        asked = pool.submit(whole_text_of, gateway)
        decoding = gateway.app.replicas[d.url].upstream

        def is_answered() -> bool:
            """The gateway has read the error, and doubts whose it is. Before that no time may pass: it would count as
            the prefill's."""
            return bool(d.asked) and gateway.call(lambda: decoding.num_open == decoding.num_idle)

        eventually(is_answered)
        gateway.advance(2.0)
        eventually(asked.done)
        d.rooms.noticed.set()
        with pytest.raises(openai.InternalServerError, match="KVTransferError"):
            asked.result()


def test_without_a_prefill_server_an_sglang_that_decodes_is_sent_nothing() -> None:
    with (
        sglangs() as ([p], d),
        in_front_of((p, "prefill"), (d, "decode")) as gateway,
        ThreadPoolExecutor(1) as pool,
    ):
        p.fails, d.rooms.noticed = True, threading.Event()
        asked = pool.submit(text_of, gateway)
        eventually(lambda: d.asked)
        d.rooms.noticed.set()
        with pytest.raises(openai.APIStatusError) as refused:
            asked.result()
        assert refused.value.status_code == 503
        assert len(d.asked) == 1  # with a room; and not again without
        assert handovers(gateway, "refused")
