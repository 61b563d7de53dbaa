"""The thread that writes what was observed: a store that does not answer, feedback, two gateways, the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.core.errors import InvalidValue, Overloaded, StoreUnavailable
from penstock.core.rollout import Arm, Block, Cell, CellKey, Metric
from penstock.gateway.rollouts.observation import Observation
from penstock.gateway.rollouts.writer import RolloutWriter, Said
from penstock.tenancy.rollouts import Rollout, RolloutBook, new_rollout
from penstock.tenancy.routes import Declared
from penstock.tenancy.store import Store, open_store
from tests.clocks import ManualClock
from tests.waiting import eventually_async

BAD = ((Metric.COMPLAINTS, 1.0),)
GOOD = ((Metric.ERRORS, 0.0),)
ERRORS = CellKey(Metric.ERRORS, Arm.NEW)
COMPLAINTS = CellKey(Metric.COMPLAINTS, Arm.NEW)


class Flaky:
    """A store that answers when it may; `tries` counts what was asked of it meanwhile."""

    def __init__(self, book: RolloutBook) -> None:
        self.book = book
        self.is_up = True
        self.tries = 0
        self.refused_at = -1.0  # of a block

    def _look(self) -> None:
        if not self.is_up:
            self.tries += 1
            raise StoreUnavailable("it is away")

    def write_blocks(self, blocks: Iterable[Block]) -> None:
        self._look()
        blocks = list(blocks)
        if any(block.at == self.refused_at for block in blocks):
            raise InvalidValue("it cannot hold this")
        self.book.write_blocks(blocks)

    def add_feedback(self, tenant: str, request_id: str, score: float, comment: str = "") -> object:
        self._look()
        return self.book.add_feedback(tenant, request_id, score, comment)

    def feedback_since(self, number: int) -> Sequence[Any]:
        self._look()
        return self.book.feedback_since(number)

    def last_feedback(self) -> int:
        self._look()
        return self.book.last_feedback()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path}/store.db") as found:
        found.routes.declare([Declared("m", {"v1": 1.0, "v2": 0.0}, {"v1": 0.0, "v2": 0.0})])
        yield found


@pytest.fixture
def rollout(store: Store) -> Rollout:
    return store.rollouts.start(new_rollout("m", "v1", "v2"))


class Writing:
    """A writer whose time is the test's."""

    def __init__(self, book: Any, rollout: Rollout, gateway: str = "g") -> None:
        self.rollout = rollout
        self.wall_s = 1000.0
        self.clock = ManualClock()
        self.writer = RolloutWriter(book, gateway, self.clock, lambda: self.wall_s)
        self.writer.start()
        self.writer.follow([rollout.order])

    def see(self, values: Any = GOOD, request_id: str = "", tenant: str = "acme") -> None:
        order = self.rollout.order
        self.writer.add(Observation(order, Arm.NEW, self.wall_s, tenant, values, None, request_id))

    def pass_block(self) -> None:
        self.wall_s += 5.0
        self.clock.advance(5.0)


def cells(store: Store, rollout: Rollout) -> dict[CellKey, Cell]:
    found: dict[CellKey, Cell] = {}
    for block in store.rollouts.blocks(rollout.id)[1]:
        for key, cell in block.cells:
            found.setdefault(key, Cell()).merge(cell)
    return found


def count(store: Store, rollout: Rollout, key: CellKey = ERRORS) -> int:
    return cells(store, rollout).get(key, Cell()).count


async def test_a_block_is_in_the_store_when_its_seconds_are_over(store: Store, rollout: Rollout) -> None:
    one = Writing(store.rollouts, rollout)
    one.see(), one.see()
    one.pass_block()
    await eventually_async(lambda: count(store, rollout), lambda found: found == 2)
    one.see()
    one.writer.close()  # the last block has not ended, and is not lost
    assert count(store, rollout) == 3
    assert [block.at for block in store.rollouts.blocks(rollout.id)[1]] == [1000.0, 1005.0]


async def test_without_a_rollout_the_writer_has_no_timer(store: Store, rollout: Rollout) -> None:
    one = Writing(store.rollouts, rollout)
    one.writer.follow([])
    one.pass_block()
    assert one.clock.waits_s == []
    one.writer.follow([rollout.order])
    assert len(one.clock.waits_s) == 1
    one.writer.close()


async def test_blocks_of_two_gateways_add_up(store: Store, rollout: Rollout) -> None:
    both = [Writing(store.rollouts, rollout, name) for name in ("g1", "g2")]
    for one in both:
        one.see()
        one.writer.close()
    assert count(store, rollout) == 2


async def test_a_store_that_is_away_for_long_loses_nothing(store: Store, rollout: Rollout) -> None:
    flaky = Flaky(store.rollouts)
    one = Writing(flaky, rollout)
    flaky.is_up = False
    blocks = 40
    for number in range(blocks):
        one.see()
        one.pass_block()
        await eventually_async(lambda: flaky.tries, lambda tries, least=number: tries > least)
    flaky.is_up = True
    one.pass_block()
    await eventually_async(lambda: count(store, rollout), lambda found: found == blocks)
    one.writer.close()
    assert one.writer.lost.counts() == {"observations": 0, "blocks": 0, "feedback": 0}
    found = store.rollouts.blocks(rollout.id)[1]
    assert len(found) < 5
    assert found[-1].at >= one.wall_s - 10.0  # late blocks would not be counted
    assert sum(block.seconds for block in found) == 5.0 * blocks


async def test_a_word_that_the_store_did_not_take_is_written_later_without_a_rollout(
    store: Store, rollout: Rollout
) -> None:
    flaky = Flaky(store.rollouts)
    one = Writing(flaky, rollout)
    one.writer.follow([])
    one.pass_block()
    flaky.is_up = False
    one.writer.say(Said("acme", "a", 1.0, ""))
    await eventually_async(lambda: flaky.tries)
    flaky.is_up = True
    one.pass_block()
    await eventually_async(store.rollouts.last_feedback, lambda number: number == 1)
    one.writer.close()


async def test_what_could_not_be_written_at_the_end_is_counted(store: Store, rollout: Rollout) -> None:
    flaky = Flaky(store.rollouts)
    one = Writing(flaky, rollout)
    flaky.is_up = False
    one.see()
    one.writer.say(Said("acme", "a", 0.0, ""))
    one.writer.close()
    assert one.writer.lost.counts() == {"observations": 0, "blocks": 1, "feedback": 1}


async def test_a_users_word_is_counted_by_the_gateway_that_answered(store: Store, rollout: Rollout) -> None:
    answered, other = (Writing(store.rollouts, rollout, name) for name in ("g1", "g2"))
    answered.see(request_id="a"), answered.see(request_id="b", tenant="rival")
    answered.pass_block()
    await eventually_async(lambda: count(store, rollout), lambda found: found == 2)
    other.writer.say(Said("acme", "a", 0.0, "wrong"))
    other.writer.say(Said("acme", "b", 0.0, "not mine"))
    await eventually_async(lambda: store.rollouts.last_feedback(), lambda number: number == 2)
    answered.pass_block(), other.pass_block()
    answered.writer.close(), other.writer.close()
    assert cells(store, rollout)[COMPLAINTS] == Cell(1, 1.0, 1.0)


async def test_a_second_word_takes_the_place_of_the_first(store: Store, rollout: Rollout) -> None:
    one = Writing(store.rollouts, rollout)
    for name in ("a", "b"):
        one.see(request_id=name)
    for said in (Said("acme", "a", 0.0, ""), Said("acme", "a", 1.0, ""), Said("acme", "b", 0.0, "")):
        one.writer.say(said)
        await eventually_async(lambda: one.writer._num_said, lambda waiting: waiting == 0)
        one.pass_block()
    one.writer.close()
    assert cells(store, rollout)[COMPLAINTS] == Cell(2, 1.0, 1.0)


async def test_a_second_word_in_a_later_step_changes_nothing_there(store: Store, rollout: Rollout) -> None:
    one = Writing(store.rollouts, rollout)
    for name in ("a", "b"):
        one.see(request_id=name)
    later = replace(rollout.order, step=rollout.order.step + 1)
    for said, order in (
        (Said("acme", "a", 0.0, ""), rollout.order),
        (Said("acme", "a", 0.5, ""), later),
        (Said("acme", "b", 1.0, ""), later),
    ):
        one.writer.follow([order])
        one.writer.say(said)
        await eventually_async(lambda: one.writer._num_said, lambda waiting: waiting == 0)
        one.pass_block()
    one.writer.close()
    found = {block.step: dict(block.cells).get(COMPLAINTS) for block in store.rollouts.blocks(rollout.id)[1]}
    assert found[rollout.order.step] in (Cell(1, 1.0, 1.0), None)
    assert found[later.step] == Cell(1, 0.0, 0.0)


async def test_a_word_that_is_said_while_nothing_is_measured_is_none(store: Store, rollout: Rollout) -> None:
    one = Writing(store.rollouts, rollout)
    for name in ("a", "b", "c"):
        one.see(request_id=name)
    left_alone = replace(rollout.order, is_measured=False)
    for said, order in (
        (Said("acme", "a", 0.0, ""), rollout.order),
        (Said("acme", "a", 1.0, ""), left_alone),
        (Said("acme", "b", 0.0, ""), left_alone),
        (Said("acme", "a", 0.5, ""), rollout.order),
        (Said("acme", "c", 1.0, ""), rollout.order),
    ):
        one.writer.follow([order])
        one.writer.say(said)
        await eventually_async(lambda: one.writer._num_said, lambda waiting: waiting == 0)
        one.pass_block()
    one.writer.close()
    assert cells(store, rollout)[COMPLAINTS] == Cell(2, 0.5, 0.25)


async def test_words_that_the_store_cannot_take_are_refused_at_last(store: Store, rollout: Rollout) -> None:
    flaky = Flaky(store.rollouts)
    flaky.is_up = False
    one = Writing(flaky, rollout)
    for number in range(1000):
        one.writer.say(Said("acme", str(number), 0.0, ""))
    with pytest.raises(Overloaded):
        one.writer.say(Said("acme", "one more", 0.0, ""))
    one.writer.close()
    assert one.writer.lost.feedback == 1000


async def test_a_word_that_the_store_refuses_is_given_up_and_blocks_are_written(store: Store, rollout: Rollout) -> None:
    one = Writing(store.rollouts, rollout)
    one.writer.say(Said("acme", "a", 0.0, "\0"))
    one.writer.say(Said("acme", "b", 0.0, "fine"))
    one.see()
    one.pass_block()
    await eventually_async(lambda: count(store, rollout), lambda found: found == 1)
    await eventually_async(store.rollouts.last_feedback, lambda number: number == 1)
    one.writer.close()
    assert one.writer._num_said == 0
    assert one.writer.lost.counts() == {"observations": 0, "blocks": 0, "feedback": 1}


async def test_a_block_that_the_store_refuses_is_given_up_and_others_are_written(
    store: Store, rollout: Rollout
) -> None:
    flaky = Flaky(store.rollouts)
    flaky.refused_at = 1000.0
    one = Writing(flaky, rollout)
    one.writer.follow([])  # nothing is written before the end
    for at in (1000.0, 1005.0, 1010.0):
        one.wall_s = at
        one.see()
    one.wall_s = 1015.0
    one.writer.close()
    assert one.writer.lost.blocks == 1
    assert [block.at for block in store.rollouts.blocks(rollout.id)[1]] == [1005.0, 1010.0]


async def test_words_that_cannot_be_written_keep_no_block_waiting(store: Store, rollout: Rollout) -> None:
    class Mute(Flaky):
        def add_feedback(self, tenant: str, request_id: str, score: float, comment: str = "") -> object:
            raise StoreUnavailable("for words")

    one = Writing(Mute(store.rollouts), rollout)
    one.writer.say(Said("acme", "a", 0.0, ""))
    one.see()
    one.pass_block()
    await eventually_async(lambda: count(store, rollout), lambda found: found == 1)
    one.writer.close()
    assert one.writer.lost.feedback == 1
