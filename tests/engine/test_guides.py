"""Real guides in a real engine process over the fake runner, whose tokens are as good as random."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import pytest_asyncio

from penstock.core.errors import EngineFailed, UnsupportedParameter
from penstock.core.guide import Guide
from penstock.core.request import FinishReason, Request, TokenEvent
from penstock.core.sampling import SamplingParams
from penstock.engine.client import EngineClient
from penstock.engine.fake import fake_token
from penstock.engine.guides import Guides
from penstock.sched.guiding import Follow
from penstock.text.grammars import Matcher
from tests.engine.expecting import engine, read
from tests.text.walking import EOS, allowed, tokenizer, vocabulary
from tests.waiting import GIVE_UP_S

LATE = Guide("grammar", 'start: /[a-z]{8}/ "x"{100000}')  # passes every trial, and then is over the library's limits
PERSON = Guide(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "first": {"type": "string", "maxLength": 8},
                "kind": {"enum": ["cat", "dog", "none of them"]},
                "age": {"type": "integer", "minimum": 0, "maximum": 120},
            },
            "required": ["first", "kind", "age"],
            "additionalProperties": False,
        }
    ),
)


in_its_loop = pytest.mark.asyncio(loop_scope="module")  # the client's


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client() -> AsyncIterator[EngineClient]:
    """One engine for all tests: what one of them asked leaves no trace for the next."""
    async with engine(is_guided=True, vocab_size=tokenizer().vocab_size, num_blocks=128) as running:
        yield running


def request(name: str, guide: Guide | None = PERSON, max_tokens: int = 100, **options: Any) -> Request:
    return Request(name, [5, 6, 7], max_tokens, stop_token_ids=[EOS], guide=guide, **options)


def tokens(events: list[TokenEvent]) -> list[int]:
    return [token_id for event in events for token_id in event.token_ids]


def text(events: list[TokenEvent]) -> str:
    return str(tokenizer().decode(tokens(events)))


def is_person(answer: str) -> bool:
    found = json.loads(answer)
    return (
        list(found) == ["first", "kind", "age"]
        and found["age"] <= 120
        and found["kind"] in ("cat", "dog", "none of them")
    )


@in_its_loop
async def test_many_guided_answers_beside_free_ones(client: EngineClient) -> None:
    requests = [request(f"g{seed}", sampling=SamplingParams(seed=seed)) for seed in range(24)]
    requests += [request(f"f{seed}", None, 30, sampling=SamplingParams(seed=seed)) for seed in range(8)]
    events = await read(client.open(requests), *(r.id for r in requests))
    guided = [text(events[r.id]) for r in requests if r.guide is not None]
    assert all(map(is_person, guided))
    assert len(set(guided)) > 12
    assert all(events[f"g{seed}"][-1].finish is FinishReason.STOP for seed in range(24))


@in_its_loop
async def test_forced_tokens_come_several_at_a_time(client: EngineClient) -> None:
    events = (await read(client.open([request("a")]), "a"))["a"]
    assert max(len(event.token_ids) for event in events) > 3
    assert len(events) < len(tokens(events)) * 0.7


@in_its_loop
async def test_with_log_probabilities_every_token_is_chosen_and_scored(client: EngineClient) -> None:
    wanted = request("a", sampling=SamplingParams(num_logprobs=1))
    events = (await read(client.open([wanted]), "a"))["a"]
    assert is_person(text(events))
    scored = [event for event in events if event.token_ids != [EOS]]
    assert all(len(event.logprobs or []) >= 1 for event in scored)
    assert all(len(set(event.token_ids) - {EOS}) == 1 for event in scored)


@in_its_loop
async def test_an_answer_begun_elsewhere_is_finished_as_it_would_have_been(client: EngineClient) -> None:
    whole = tokens((await read(client.open([request("whole")]), "whole"))["whole"])
    for cut in range(1, len(whole) - 1, 5):
        rest = request(f"cut{cut}", output_ids=whole[:cut])
        events = (await read(client.open([rest]), rest.id))[rest.id]
        assert is_person(str(tokenizer().decode(whole[:cut] + tokens(events))))


@in_its_loop
async def test_what_does_not_follow_its_guide_cannot_be_carried_on(client: EngineClient) -> None:
    wrong = request("a", output_ids=tokenizer().encode('{"wrong"', add_special_tokens=False))
    with pytest.raises(EngineFailed, match="generated elsewhere"):
        await read(client.open([wrong]), "a")


@in_its_loop
async def test_no_end_before_min_tokens_as_long_as_there_is_something_to_say(client: EngineClient) -> None:
    digits = Guide("regex", "[0-9]{1,60}")
    events = (await read(client.open([request("a", digits, min_tokens=20)]), "a"))["a"]
    assert len(tokens(events)) > 20
    short = (await read(client.open([request("b", Guide("regex", "[0-9]{2}"), min_tokens=20)]), "b"))["b"]
    assert len(text(short)) == 2
    assert short[-1].finish is FinishReason.STOP


@in_its_loop
async def test_the_output_limit_ends_a_guided_answer_too(client: EngineClient) -> None:
    events = (await read(client.open([request("a", max_tokens=7)]), "a"))["a"]
    assert len(tokens(events)) == 7
    assert events[-1].finish is FinishReason.LENGTH


@in_its_loop
async def test_a_guided_request_can_be_aborted(client: EngineClient) -> None:
    with client.open([request("a", Guide("regex", "a{1000}b*"), 400)]) as stream:
        await stream.next()
    events = await read(client.open([request("b")]), "b")
    assert is_person(text(events["b"]))


async def test_an_engine_without_guides_says_so() -> None:
    async with engine() as plain:
        with pytest.raises(UnsupportedParameter, match="guide"):
            await read(plain.open([request("a")]), "a")


@pytest.mark.parametrize("is_quick", [True, False])
async def test_on_a_device_that_overlaps_answers_follow_their_guides_too(is_quick: bool) -> None:
    options = {"is_guided": True, "are_guides_quick": is_quick, "vocab_size": tokenizer().vocab_size}
    async with engine(**options, overlaps=True, num_blocks=40) as client:
        requests = [request(f"g{seed}", sampling=SamplingParams(seed=seed)) for seed in range(10)]
        requests.append(request("free", None, 40))
        events = await read(client.open(requests), *(r.id for r in requests))
        assert all(is_person(text(events[r.id])) for r in requests if r.guide is not None)
        assert len(tokens(events["free"])) == 40 or events["free"][-1].finish is FinishReason.STOP


def drive(wanted: Request, quick_s: float = math.inf) -> list[int]:
    """What the fake model says, by hand."""
    live = Guides(vocabulary(), quick_s=quick_s).open(wanted)
    said: list[int] = []
    while True:
        choices = allowed(live.bits())
        said.append(choices[fake_token(said, len(choices), seed=wanted.sampling.seed)])
        follow = live.take(said[-1])
        said += follow.token_ids
        if follow.finish is not None:
            assert follow.finish is FinishReason.STOP
            return said


@pytest.mark.parametrize("seed", range(8))
def test_an_answer_does_not_depend_on_how_quick_its_guide_is(seed: int) -> None:
    quick = drive(request("a", sampling=SamplingParams(seed=seed)))
    assert is_person(str(tokenizer().decode(quick)))
    assert drive(request("a", sampling=SamplingParams(seed=seed, num_logprobs=0))) == quick
    assert drive(request("a", sampling=SamplingParams(seed=seed)), quick_s=0.0) == quick


def test_an_end_that_was_drafted_is_taken_though_nobody_asked_for_its_mask() -> None:
    """Accepted drafts are taken one after the other, and masks are made between steps."""
    live = Guides(vocabulary()).open(request("a", Guide("regex", "[a-z]+")))
    letter = allowed(live.bits())[0]
    assert live.take(letter).finish is None
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(live.take, EOS).result(GIVE_UP_S).finish is FinishReason.STOP


def test_a_guide_becomes_ready_by_itself_and_is_made_once() -> None:
    guides = Guides(vocabulary())
    first = guides.open(request("a"))
    mask = first.bits()
    assert first.is_ready
    assert tokenizer().encode("{", add_special_tokens=False)[0] in allowed(mask)
    assert EOS not in allowed(mask)
    assert guides.open(request("b")).bits() == mask


def test_waiting_for_guides_ends_when_one_is_ready() -> None:
    guides = Guides(vocabulary())
    live = guides.open(request("a"))
    while not live.is_ready:
        guides.wait(60)


def test_a_guide_that_gets_too_complex_on_the_way_ends_with_an_error() -> None:
    """It is over a limit of the library after its first token."""
    guides = Guides(vocabulary())
    live = guides.open(request("a", LATE))
    mask = live.bits()
    for _ in range(50):
        follow = live.take(allowed(mask)[0])
        if follow.finish is not None:
            break
        mask = live.bits()
        assert allowed(mask)
    assert follow.finish is FinishReason.ERROR
    assert "guide" in (follow.error or "")
    assert follow.error_code == UnsupportedParameter.code


@in_its_loop
async def test_a_guide_that_fails_on_the_way_is_its_requests_fault_and_others_go_on(client: EngineClient) -> None:
    requests = [request("late", LATE), request("good")]
    late, good = client.open(requests[:1]), client.open(requests[1:])
    with pytest.raises(UnsupportedParameter, match="could not be kept to its guide"):
        await read(late, "late")
    assert is_person(text((await read(good, "good"))["good"]))


class Panic(BaseException):
    """An error like the library's own, which are no Exceptions either."""


@pytest.mark.parametrize("name", ["mask", "forced", "take", "copy"])
def test_whatever_a_matcher_raises_ends_its_own_answer_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: object) -> None:
        raise Panic("attempt to subtract with overflow")

    guides = Guides(vocabulary())
    good = guides.open(request("good"))
    good.bits()
    monkeypatch.setattr(Matcher, name, panic)
    live = guides.open(request("a", Guide("regex", "[a-z]{5}")))
    follow = live.take(allowed(live.bits())[0])
    assert (follow.finish, follow.error_code) == (FinishReason.ERROR, UnsupportedParameter.code)
    monkeypatch.undo()
    assert good.take(allowed(good.bits())[0]).finish is None


def test_an_answer_that_only_lacked_its_end_elsewhere_ends_here() -> None:
    """Its matcher is over, and takes no token any more."""
    whole = tokenizer().encode("yes", add_special_tokens=False)
    live = Guides(vocabulary()).open(request("a", Guide("regex", "yes"), output_ids=whole))
    assert allowed(live.bits()) == [EOS]
    assert live.take(EOS) == Follow([], FinishReason.STOP)


def test_what_was_made_for_one_tenant_is_made_again_for_another() -> None:
    guides = Guides(vocabulary())
    for tenant in ("one", "two", "two"):
        guides.open(request("a", tenant=tenant)).bits()
    assert [tenant for tenant, _ in guides._kept] == ["one", "two"]
