"""Trials of guides: whose come when, and who can tell."""

from __future__ import annotations

import asyncio

import pytest

from penstock.api.openai.guided import GuideAsked
from penstock.core.errors import EngineUnavailable, Overloaded, UnsupportedParameter
from penstock.core.guide import Guide
from penstock.observe.catalog import CATALOG
from penstock.observe.registry import Registry
from penstock.server import guides
from penstock.server.guide_protocol import Verdict
from penstock.server.guides import GuideTrials
from tests.clocks import ManualClock


class Held(GuideTrials):
    """Its process answers when it is told to."""

    def __init__(self) -> None:
        super().__init__(no_text, [2], Registry(CATALOG), ManualClock())
        self.tried: list[str] = []
        self.may_answer = asyncio.Event()

    async def _ask(self, guide: Guide) -> Verdict:
        self.tried.append(guide.source)
        await self.may_answer.wait()
        return Verdict(len(self.tried), guide)


async def no_text() -> bytes:
    raise AssertionError("nobody is to ask")


def asked(source: str) -> GuideAsked:
    return GuideAsked(Guide("regex", source), "guided_regex")


async def turn() -> None:
    """Everything that can go on has."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_what_one_tenant_has_sent_is_new_for_another() -> None:
    trials = Held()
    trials.may_answer.set()
    for tenant in ("one", "two", "one"):
        assert await trials.check(asked("same"), tenant) == Guide("regex", "same")
    assert trials.tried == ["same", "same"]


async def test_two_tenants_do_not_wait_for_the_same_trial() -> None:
    trials = Held()
    waiting = [asyncio.create_task(trials.check(asked("same"), tenant)) for tenant in ("one", "two", "one")]
    await turn()
    assert trials.tried == ["same", "same"]
    trials.may_answer.set()
    await asyncio.gather(*waiting)


async def test_a_tenant_with_many_new_guides_waits_for_its_own_and_others_do_not() -> None:
    trials = Held()
    many = [asyncio.create_task(trials.check(asked(f"many{i}"), "one")) for i in range(guides._MAX_OPEN)]
    await turn()
    with pytest.raises(Overloaded):
        await trials.check(asked("one more"), "one")
    other = asyncio.create_task(trials.check(asked("other"), "two"))
    await turn()
    assert trials.tried == [*(f"many{i}" for i in range(guides._MAX_AT_PROCESS)), "other"]
    trials.may_answer.set()
    await asyncio.gather(*many, other)
    assert trials._turns == {}


async def test_no_process_is_started_for_those_who_still_wait_when_the_server_stops() -> None:
    trials = GuideTrials(no_text, [2], Registry(CATALOG), ManualClock())
    await trials.close()
    with pytest.raises(EngineUnavailable, match="stopping"):
        await trials.check(asked("a"), "")


async def test_a_model_without_an_end_of_its_answers_is_guided_by_nothing() -> None:
    trials = GuideTrials(no_text, [], Registry(CATALOG), ManualClock())
    with pytest.raises(UnsupportedParameter, match="end of its answers"):
        await trials.check(asked("a"), "")
