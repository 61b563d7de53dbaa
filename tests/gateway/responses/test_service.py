"""Responses that a gateway keeps, with OpenAI's official client, before replicas that are real but for the model."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from penstock.api.responses.stored import read_state
from penstock.cli.gateway_process import _responses
from penstock.core.errors import BodyTooLarge
from penstock.gateway.app import Gateway
from penstock.gateway.responses.background import LEASE_S, RENEW_EVERY_S
from penstock.gateway.responses.service import ResponseService
from penstock.gateway.responses.settings import ResponseSettings
from penstock.gateway.settings.gateway import GatewaySettings
from penstock.tenancy.responses import ResponseBook
from penstock.tenancy.store import Store, open_store
from tests.clocks import ManualClock
from tests.gateway.running import RunningGateway, running_gateway
from tests.images.samples import url
from tests.server.replica import NAME, Replica, serving
from tests.server.seeing import seeing
from tests.waiting import GIVE_UP_S, eventually

QUESTION: Any = {"role": "user", "content": "the first and the second"}
GREEDY: Any = {"model": NAME, "temperature": 0, "max_output_tokens": 12}


@contextlib.contextmanager
def keeping(
    book: ResponseBook, *replicas: Replica, settings: ResponseSettings | None = None, **options: Any
) -> Iterator[RunningGateway]:
    def make(routes: Any, services: Any, *arguments: Any, clock: Any, **more: Any) -> Gateway:
        kept = ResponseService(book, settings or ResponseSettings(), clock, services.ledger)
        return Gateway(routes, services, *arguments, clock=clock, responses=kept, **more)

    with running_gateway(*replicas, make=make, **options) as gateway:
        yield gateway


def frozen(store: Store) -> ResponseBook:
    """The store of responses at one moment: no lease runs out because the machine is slow."""
    now_s = time.time()
    return ResponseBook(store._database, lambda: now_s)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path_factory.mktemp('store') / 'penstock.db'}") as opened:
        yield opened


@pytest.fixture(scope="module")
def gateway(store: Store, replica_at_hand: Replica) -> Iterator[RunningGateway]:
    with keeping(frozen(store), replica_at_hand) as found:
        yield found
        eventually(found.is_idle)


def create(client: openai.OpenAI, asked: Any = QUESTION["content"], **options: Any) -> Response:
    answer: Response = client.responses.create(input=asked, **GREEDY | options)
    return answer


def ended(client: openai.OpenAI, response_id: str) -> Response:
    return eventually(lambda: client.responses.retrieve(response_id), lambda found: found.status != "in_progress")


def is_missing(client: openai.OpenAI, response_id: str) -> bool:
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.retrieve(response_id)
    return missing.value.code == "response_not_found"


def test_a_conversation_goes_on_from_a_response_that_is_kept(gateway: RunningGateway, replica_at_hand: Replica) -> None:
    client = gateway.openai
    first = create(client, instructions="Be brief.")
    second = create(client, "And?", previous_response_id=first.id)
    third = create(client, [{"role": "user", "content": "So?"}], previous_response_id=second.id)
    turns = [QUESTION, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "And?"}]
    assert second.output_text == replica_at_hand.answer(turns, 12)  # instructions are for one turn only
    turns += [{"role": "assistant", "content": second.output_text}, {"role": "user", "content": "So?"}]
    assert third.output_text == replica_at_hand.answer(turns, 12)
    assert (third.previous_response_id, third.store) == (second.id, True)  # type: ignore[attr-defined]
    assert client.responses.retrieve(third.id) == third


def test_the_input_of_a_response_is_listed(gateway: RunningGateway) -> None:
    client = gateway.openai
    said = {"role": "assistant", "content": "Yes."}
    first = create(client, [QUESTION, said, QUESTION])
    listed = list(client.responses.input_items.list(first.id, order="asc", limit=2))
    assert [item.role for item in listed] == ["user", "assistant", "user"]  # type: ignore[union-attr]
    assert listed[1].content[0].text == "Yes."  # type: ignore[union-attr, index]
    assert len({item.id for item in listed}) == 3
    newest = client.responses.input_items.list(first.id, limit=1)
    assert ([item.id for item in newest.data], newest.has_more) == ([listed[-1].id], True)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.input_items.list(first.id, limit=1000)
    assert refused.value.param == "limit"


def test_a_stream_is_kept_when_its_end_is_read(gateway: RunningGateway, replica_at_hand: Replica) -> None:
    client = gateway.openai
    events = list(client.responses.create(input="a stream", stream=True, **GREEDY))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1].response
    assert client.responses.retrieve(final.id).output_text == final.output_text
    second = create(client, "And?", previous_response_id=final.id)
    turns = [{"role": "user", "content": "a stream"}, {"role": "assistant", "content": final.output_text}]
    assert second.output_text == replica_at_hand.answer([*turns, {"role": "user", "content": "And?"}], 12)


def test_a_response_is_forgotten_on_request(gateway: RunningGateway) -> None:
    client = gateway.openai
    first = create(client)
    second = create(client, "And?", previous_response_id=first.id)
    client.responses.delete(first.id)
    assert is_missing(client, first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="no longer kept") as refused:
        create(client, "So?", previous_response_id=second.id)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")


def test_what_shall_not_be_kept_is_not(gateway: RunningGateway) -> None:
    answer = create(gateway.openai, store=False)
    assert answer.store is False  # type: ignore[attr-defined]
    assert is_missing(gateway.openai, answer.id)


def test_tenants_see_their_own_responses_alone(store: Store, replica_at_hand: Replica) -> None:
    with keeping(frozen(store), replica_at_hand) as gateway:
        one, other = (gateway.client(gateway.add_tenant(name)) for name in ("one", "other"))
        answer = create(one)
        assert one.responses.retrieve(answer.id).output_text == answer.output_text
        assert is_missing(other, answer.id)
        with pytest.raises(openai.BadRequestError) as refused:
            create(other, "And?", previous_response_id=answer.id)
        assert refused.value.code == "previous_response_not_found"
        with pytest.raises(openai.NotFoundError):
            other.responses.delete(answer.id)
        with pytest.raises(openai.AuthenticationError):
            gateway.client("psk_nobody").responses.retrieve(answer.id)


def test_paths_under_a_response_that_do_not_exist(gateway: RunningGateway) -> None:
    client = gateway.openai
    with pytest.raises(openai.NotFoundError):
        client.get("/responses/resp_1/other", cast_to=object)
    with pytest.raises(openai.APIStatusError) as refused:
        client.post("/responses/resp_1", cast_to=object)
    assert refused.value.status_code == 405
    kept = create(client)
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.responses.retrieve(kept.id, stream=True)
    assert unsupported.value.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model":"small","input":"\xff"}', "input"),
        (b'{"model":"small","input":[{"role":"user","content":"\xff"}]}', "input"),
        (b'{"model":"small","input":5}', "input"),
        (b'{"model":"small","input":[5]}', "input"),
        (b'{"model":"small","input":' + b"[" * 2000 + b"]" * 2000 + b"}", None),
        (b'{"model":"small","input":[' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"]}", None),
        (b'{"model":"small","input":"x","store":"yes"}', "store"),
        (b'{"model":"small","input":"x","previous_response_id":"\\u0000"}', "previous_response_id"),
        (b'{"model":"small","input":"x","previous_response_id":"%b"}' % (b"r" * 200), "previous_response_id"),
        (b'{"model":"small"}', "input"),
        (b"[]", None),
        (b"", None),
    ],
)
def test_what_is_no_request_is_refused_as_such(gateway: RunningGateway, body: bytes, param: str | None) -> None:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=GIVE_UP_S)) as connection:
        connection.request("POST", "/v1/responses", body)
        answer = connection.getresponse()
        error = json.loads(answer.read())["error"]
    assert answer.status == 400
    assert param is None or error["param"] == param


def test_a_store_that_fails_costs_nobody_an_answer(tmp_path: Path, replica_at_hand: Replica) -> None:
    with (
        open_store(f"sqlite:///{tmp_path / 'penstock.db'}") as broken,
        keeping(frozen(broken), replica_at_hand) as gateway,
    ):
        kept = create(gateway.openai)
        broken.close()
        whole = create(gateway.openai)
        final = list(gateway.openai.responses.create(input="a stream", stream=True, **GREEDY))[-1].response
        stored = [answer.store for answer in (kept, whole, final)]  # type: ignore[attr-defined]
        assert stored == [True, False, False]
        with pytest.raises(openai.APIStatusError) as refused:
            create(gateway.openai, previous_response_id=kept.id)
        assert (refused.value.status_code, refused.value.code) == (503, "store_unavailable")  # type: ignore[attr-defined]


def test_a_gateway_that_keeps_nothing_refuses_what_needs_it(store: Store, replica_at_hand: Replica) -> None:
    with keeping(frozen(store), replica_at_hand, settings=ResponseSettings(keep_s=0)) as gateway:
        assert create(gateway.openai).store is False  # type: ignore[attr-defined]
        with pytest.raises(openai.BadRequestError) as refused:
            create(gateway.openai, background=True)
        assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "background")


# -- in the background


def test_a_response_is_made_in_the_background(gateway: RunningGateway, replica_at_hand: Replica) -> None:
    client = gateway.openai
    queued = create(client, background=True, metadata={"k": "v"})
    assert (queued.status, queued.background, queued.output) == ("queued", True, [])
    found = ended(client, queued.id)
    assert (found.id, found.status, found.metadata) == (queued.id, "incomplete", {"k": "v"})
    assert found.output_text == replica_at_hand.answer([QUESTION], 12)
    assert found.usage is not None
    eventually(gateway.is_idle)
    assert gateway.ledger.usages[-1].output_tokens == found.usage.output_tokens == 12
    second = create(client, "And?", previous_response_id=queued.id)
    assert second.output
    assert client.responses.cancel(queued.id).status == "incomplete"  # it had ended


def test_what_is_wrong_with_a_background_request_is_told_at_once(gateway: RunningGateway) -> None:
    for wrong in ({"model": "other"}, {"top_p": 2}, {"store": False}, {"truncation": "some"}):
        with pytest.raises(openai.APIStatusError) as refused:
            create(gateway.openai, background=True, **wrong)
        assert refused.value.status_code in (400, 404)


def test_one_that_its_tenant_has_no_room_for_fails_in_the_background(store: Store, replica_at_hand: Replica) -> None:
    with keeping(frozen(store), replica_at_hand) as gateway:
        client = gateway.client(gateway.add_tenant("small", limits={"requests_per_minute": 1}))
        queued = create(client, background=True)
        assert ended(client, queued.id).status == "incomplete"
        late = create(client, background=True)
        found = ended(client, late.id)
        assert found.status == "failed"
        assert found.error is not None
        assert found.error.code == "rate_limit_exceeded"


def test_one_that_is_cancelled_leaves_its_replica(store: Store) -> None:
    asked = {"background": True, "max_output_tokens": 1500, "extra_body": {"ignore_eos": True}}
    with serving(step_s=0.01) as slow, keeping(frozen(store), slow) as gateway:
        client = gateway.openai
        for end in (client.responses.cancel, client.responses.delete):
            queued = create(client, **asked)
            eventually(lambda: not slow.is_idle())
            end(queued.id)
            eventually(slow.is_idle)
            eventually(gateway.is_idle)
            if end == client.responses.cancel:
                assert client.responses.retrieve(queued.id).status == "cancelled"
            else:
                assert is_missing(client, queued.id)
        with pytest.raises(openai.BadRequestError, match="synchronous"):
            client.responses.cancel(create(client).id)


def test_a_process_hears_with_its_next_lease_what_another_has_cancelled(store: Store) -> None:
    clock = ManualClock()
    asked = {"background": True, "max_output_tokens": 1500, "extra_body": {"ignore_eos": True}}
    with serving(step_s=0.01) as slow, keeping(frozen(store), slow, clock=clock) as gateway:
        queued = create(gateway.openai, **asked)
        eventually(lambda: not slow.is_idle())
        assert store.responses.end("anonymous", queued.id, status="cancelled", response="{}")
        gateway.advance(RENEW_EVERY_S)
        eventually(slow.is_idle)
        eventually(gateway.is_idle)


def test_an_orphan_of_a_process_that_died_is_told_to_have_failed(store: Store, replica_at_hand: Replica) -> None:
    now = [time.time()]
    book = ResponseBook(store._database, lambda: now[0])
    with keeping(book, replica_at_hand) as other:
        answer = create(other.openai)
        book.add(
            "anonymous",
            "resp_orphan",
            previous_id=answer.id,
            status="in_progress",
            input="[]",
            response='{"id":"resp_orphan","object":"response","status":"in_progress","output":[]}',
            limits=ResponseSettings().limits,
            owner="a process that died",
            lease_s=30.0,
        )
        assert other.openai.responses.retrieve("resp_orphan").status == "in_progress"
        with pytest.raises(openai.BadRequestError, match="in_progress"):
            create(other.openai, "And?", previous_response_id="resp_orphan")
        now[0] += 30.0
        for _ in range(2):
            found = other.openai.responses.retrieve("resp_orphan")
            assert (found.status, found.error and found.error.code) == ("failed", "server_error")


def test_a_gateway_that_stops_leaves_its_background_responses_to_another(
    store: Store, replica_at_hand: Replica
) -> None:
    with serving() as stuck, stuck.engine_paused(), keeping(frozen(store), stuck) as first:
        queued = create(first.openai, background=True)
        eventually(lambda: not first.is_idle())
    assert first.ledger.usages == []  # whoever makes it charges for it
    with keeping(frozen(store), replica_at_hand) as second:
        second.call(second.app.responses._background._take_over)  # type: ignore[union-attr]
        found = ended(second.openai, queued.id)
        eventually(second.is_idle)
    assert (found.status, found.output_text) == ("incomplete", replica_at_hand.answer([QUESTION], 12))
    assert [usage.request_id for usage in second.ledger.usages] == [queued.id]


def test_a_response_whose_gateway_stands_still_is_made_and_charged_by_another(
    store: Store, replica_at_hand: Replica
) -> None:
    now, clock = [time.time()], ManualClock()
    book = ResponseBook(store._database, lambda: now[0])
    with (
        serving() as stuck,
        keeping(book, stuck, clock=clock) as first,
        keeping(book, replica_at_hand) as second,
        stuck.engine_paused(),
    ):
        queued = create(first.openai, background=True)
        eventually(lambda: not first.is_idle())
        now[0] += LEASE_S
        second.call(second.app.responses._background._take_over)  # type: ignore[union-attr]
        assert ended(second.openai, queued.id).output_text == replica_at_hand.answer([QUESTION], 12)
        first.advance(RENEW_EVERY_S)  # it hears that the response is no longer its
        eventually(first.is_idle)
    bills = [*first.ledger.usages, *second.ledger.usages]
    assert {usage.request_id for usage in bills} == {queued.id}  # the store counts each name once
    assert second.ledger.usages[0].output_tokens == 12


def test_nobody_has_all_the_room_for_background_responses(store: Store) -> None:
    asked = {"background": True, "max_output_tokens": 1500, "extra_body": {"ignore_eos": True}}
    settings = ResponseSettings(max_background=4)
    with serving(step_s=0.01) as slow, keeping(frozen(store), slow, settings=settings) as gateway:
        one, other = (gateway.client(gateway.add_tenant(name)) for name in ("one", "other"))
        queued = [create(one, **asked) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="in the background"):
            create(one, **asked)
        late = create(other, **asked)
        for response in queued:
            one.responses.cancel(response.id)
        other.responses.cancel(late.id)
        eventually(slow.is_idle)


def test_an_end_that_the_store_did_not_take_is_told_to_it_again(tmp_path: Path, replica_at_hand: Replica) -> None:
    url, clock = f"sqlite:///{tmp_path / 'penstock.db'}", ManualClock()
    with open_store(url) as opened, keeping(frozen(opened), replica_at_hand, clock=clock) as gateway:
        with replica_at_hand.engine_paused():
            queued = create(gateway.openai, background=True)
            with opened._database.writing() as execute:
                execute("ALTER TABLE responses RENAME TO hidden")
        eventually(gateway.is_idle)
        eventually(lambda: gateway.app.responses._background._unsaved)  # type: ignore[union-attr]
        with opened._database.writing() as execute:
            execute("ALTER TABLE hidden RENAME TO responses")
        assert gateway.openai.responses.retrieve(queued.id).status == "in_progress"
        gateway.advance(RENEW_EVERY_S)
        assert ended(gateway.openai, queued.id).status == "incomplete"


# -- failover


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_kept_response_goes_on_elsewhere_when_its_replica_cannot(store: Store, is_stream: bool) -> None:
    asked = GREEDY | {"max_output_tokens": 40, "extra_body": {"ignore_eos": True}}
    with (
        serving(step_s=0.02) as slow,
        serving() as fast,
        keeping(frozen(store), slow, fast, clock=ManualClock()) as gateway,
    ):
        whole = fast.openai.responses.create(input="on and on", **asked)
        gateway.set_in_use(fast, False)
        if is_stream:
            events = iter(gateway.openai.responses.create(input="on and on", stream=True, **asked))
            seen = [next(events) for _ in range(8)]
            gateway.set_in_use(fast, True)
            slow.kill_engine()
            seen += events
            assert [event.sequence_number for event in seen] == list(range(len(seen)))
            assert (
                "".join(event.delta for event in seen if event.type == "response.output_text.delta")
                == whole.output_text
            )
            final = seen[-1].response
        else:
            queued = gateway.openai.responses.create(input="on and on", background=True, **asked)
            eventually(lambda: not slow.is_idle())
            gateway.set_in_use(fast, True)
            slow.kill_engine()

            def look() -> Response:
                gateway.advance(0.1)  # there is a pause before another replica is asked
                return gateway.openai.responses.retrieve(queued.id)

            final = eventually(look, lambda found: found.status != "in_progress")
        assert final.output_text == whole.output_text
        assert gateway.openai.responses.retrieve(final.id).output_text == whole.output_text


def test_a_conversation_goes_on_after_an_image(store: Store) -> None:
    image: Any = {"type": "input_image", "image_url": url(64, 64)}
    question: Any = {"role": "user", "content": [{"type": "input_text", "text": "What is it?"}, image]}
    with seeing() as replica, keeping(frozen(store), replica) as gateway:
        first = gateway.openai.responses.create(**GREEDY, input=[question])
        second = gateway.openai.responses.create(**GREEDY, input="And now?", previous_response_id=first.id)
        assert first.usage is not None
        assert second.usage is not None
        assert second.usage.input_tokens_details.model_extra == {"image_tokens": 64}
        assert second.usage.input_tokens > first.usage.input_tokens
        (kept,) = gateway.openai.responses.input_items.list(first.id, order="asc").data
        assert kept.content[1].image_url == image["image_url"]  # type: ignore[union-attr]
        eventually(gateway.is_idle)


def test_a_response_is_kept_of_a_body_as_large_as_the_gateway_takes(tmp_path: Path) -> None:
    part = {"type": "input_image", "image_url": "data:;base64," + "A" * (9 << 20)}
    body = json.dumps({"model": NAME, "input": [{"role": "user", "content": [part]}]}).encode()
    url, asked = f"sqlite:///{tmp_path / 'penstock.db'}", read_state(body)
    for max_body_bytes, is_taken in ((8 << 20, False), (16 << 20, True)):
        settings = GatewaySettings(max_body_bytes=max_body_bytes)
        kept = _responses(settings, url, None)  # type: ignore[arg-type]
        with contextlib.nullcontext() if is_taken else pytest.raises(BodyTooLarge):
            assert len(kept._resolve("anonymous", body, asked).body) > len(body)
