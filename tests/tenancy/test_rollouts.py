"""One contract, on real SQLite and on real PostgreSQL."""

from __future__ import annotations

import threading

import msgspec
import pytest
from msgspec import Raw
from msgspec.structs import replace

from penstock.core.errors import Conflict, InvalidValue, LeaseLost, ModelNotFound, RolloutNotFound
from penstock.core.rollout import Arm, Block, Cell, CellKey, Metric, RolloutOrder
from penstock.tenancy.follower import Follower
from penstock.tenancy.rollouts import Rollout, RolloutVerb, new_rollout
from penstock.tenancy.routes import Declared, SharesAsked
from penstock.tenancy.store import Store, open_store
from tests.waiting import eventually


class Entry(msgspec.Struct):
    text: str


@pytest.fixture
def chat(store: Store) -> Store:
    store.routes.declare([Declared("chat", {"v1": 100.0, "v2": 0.0}, {"v1": 0.0, "v2": 0.0})])
    return store


@pytest.fixture
def rollout(chat: Store) -> Rollout:
    return chat.rollouts.start(
        replace(new_rollout("chat", "v1", "v2", by="root"), state=Raw(b'{"hold_s":60}')), [Entry("began")]
    )


def block(rollout: Rollout, at: float, count: int = 1, *, step: int = 0, gateway: str = "g1") -> Block:
    cell = Cell()
    for _ in range(count):
        cell.add(-1.0, binned=True)
    return Block(rollout.id, step, gateway, at, 5.0, [(CellKey(Metric.TTFT, Arm.NEW, "4/2"), cell)])


def test_a_rollout_is_kept_with_its_state_and_its_story(chat: Store, rollout: Rollout) -> None:
    found = chat.rollouts.get(rollout.id)
    assert found == rollout
    assert (found.model, found.old, found.new, found.by, bytes(found.state)) == (
        "chat",
        "v1",
        "v2",
        "root",
        b'{"hold_s":60}',
    )
    assert [(one.number, bytes(one.document)) for one in chat.rollouts.story(found.id)] == [(1, b'{"text":"began"}')]
    assert chat.rollouts.on_for("chat") == found
    assert chat.rollouts.all("other") == []


def test_a_model_has_one_rollout_at_a_time(chat: Store, rollout: Rollout) -> None:
    with pytest.raises(Conflict, match=f"rollout {rollout.id} of 'chat' is on"):
        chat.rollouts.start(new_rollout("chat", "v1", "v2"))
    over = chat.rollouts.change(replace(rollout, is_over=True, phase="done"))
    assert (over.ended_at is not None, over.order.is_over) == (True, True)
    again = chat.rollouts.start(new_rollout("chat", "v2", "v1"))
    assert [one.id for one in chat.rollouts.on()] == [again.id]
    assert {one.id for one in chat.rollouts.all("chat")} == {rollout.id, again.id}


def test_what_cannot_be_rolled_out_is_refused_by_name(chat: Store) -> None:
    with pytest.raises(ModelNotFound, match="did you mean 'chat'"):
        chat.rollouts.start(new_rollout("chta", "v1", "v2"))
    with pytest.raises(InvalidValue, match="no version 'v3'"):
        chat.rollouts.start(new_rollout("chat", "v1", "v3"))
    with pytest.raises(InvalidValue, match="in place of itself"):
        chat.rollouts.start(new_rollout("chat", "v1", "v1"))
    with pytest.raises(RolloutNotFound):
        chat.rollouts.get("nobody")
    assert chat.rollouts.all() == []


def test_a_change_that_read_an_older_revision_is_refused_whole(chat: Store, rollout: Rollout) -> None:
    shares = SharesAsked({"v1": 99.0, "v2": 1.0})
    changed = chat.rollouts.change(replace(rollout, phase="one"), [Entry("moved")], shares=shares, action="step 1")
    assert chat.routes.show("chat").weights == {"v1": 99.0, "v2": 1.0}
    assert chat.routes.show("chat").last.action == "step 1"
    with pytest.raises(Conflict, match="meanwhile"):
        chat.rollouts.change(rollout, [Entry("late")], shares=SharesAsked({"v1": 0.0, "v2": 100.0}))
    assert chat.routes.show("chat").weights == {"v1": 99.0, "v2": 1.0}
    assert chat.rollouts.get(rollout.id) == changed
    assert [one.number for one in chat.rollouts.story(rollout.id)] == [1, 2]


def test_a_rollback_says_the_shares_from_before_the_rollout_again(chat: Store) -> None:
    chat.routes.change("chat", SharesAsked({"v1": 80.0, "v2": 20.0}))
    rollout = chat.rollouts.start(new_rollout("chat", "v1", "v2"))
    for share in (1.0, 25.0):
        rollout = chat.rollouts.change(rollout, shares=SharesAsked({"v1": 100 - share, "v2": share}, {"v2": 0.1}))
    rollout = chat.rollouts.change(replace(rollout, phase="aborted", is_over=True), rolls_back=True)
    route = chat.routes.show("chat")
    assert (route.weights, route.shadow["v2"]) == ({"v1": 80.0, "v2": 20.0}, 0.0)
    assert (route.last.revision, route.last.by) == (rollout.route_revision, f"rollout {rollout.id}")


def test_an_abort_needs_no_runner_to_put_the_shares_back(chat: Store, rollout: Rollout) -> None:
    moved = chat.rollouts.change(rollout, shares=SharesAsked({"v1": 50.0, "v2": 50.0}))
    given = chat.rollouts.give(rollout.id, RolloutVerb.ABORT, by="root")
    assert chat.routes.show("chat").weights == {"v1": 100.0, "v2": 0.0}
    assert given.command is not None
    assert (given.command.verb, given.command.by) == (RolloutVerb.ABORT, "root")
    with pytest.raises(Conflict, match="meanwhile"):  # a runner that had not seen it moves nothing any more
        chat.rollouts.change(moved, shares=SharesAsked({"v1": 0.0, "v2": 100.0}))
    assert chat.rollouts.give(rollout.id, RolloutVerb.ABORT).command == given.command
    with pytest.raises(Conflict, match="being aborted"):
        chat.rollouts.give(rollout.id, RolloutVerb.RESUME)
    revision = chat.routes.show("chat").last.revision
    taken = chat.rollouts.get(rollout.id)
    chat.rollouts.change(replace(taken, command=None, is_over=True, phase="aborted"), rolls_back=True)
    assert chat.routes.show("chat").last.revision == revision  # it was back already
    with pytest.raises(Conflict, match="is over"):
        chat.rollouts.give(rollout.id, RolloutVerb.PAUSE)


def test_the_last_order_counts(chat: Store, rollout: Rollout) -> None:
    for verb in (RolloutVerb.PAUSE, RolloutVerb.RESUME, RolloutVerb.PROMOTE):
        given = chat.rollouts.give(rollout.id, verb).command
        assert given is not None
        assert given.verb is verb


def test_gateways_hear_of_orders_and_not_of_every_change_of_state(chat: Store, rollout: Rollout) -> None:
    first = chat.changes()
    assert first.rollouts == (RolloutOrder(rollout.id, "chat", "v1", "v2", 0),)
    changed = chat.rollouts.change(replace(rollout, state=Raw(b'{"seen":1}')))
    assert chat.changes(first.revision).revision == first.revision
    changed = chat.rollouts.change(replace(changed, order=replace(changed.order, step=1)))
    second = chat.changes(first.revision)
    assert second.rollouts == (replace(rollout.order, step=1),)
    chat.add_tenant({"id": "acme"})
    assert chat.changes(second.revision).rollouts is None
    chat.rollouts.change(replace(changed, is_over=True))
    assert chat.changes(second.revision).rollouts == ()


def test_a_follower_is_told(chat: Store, rollout: Rollout, store_url: str) -> None:
    heard: list[tuple[int, ...]] = []
    told = threading.Event()

    def apply(found: object) -> None:
        heard.append(tuple(one.step for one in found))  # type: ignore[attr-defined]
        told.set()

    with Follower(open_store(store_url), lambda _: None, apply_rollouts=apply):
        assert heard == [(0,)]
        told.clear()
        chat.rollouts.change(replace(rollout, order=replace(rollout.order, step=1)))
        eventually(told.is_set)
    assert heard[-1] == (1,)


def test_blocks_come_in_the_order_of_their_commits_and_each_counts_once(chat: Store, rollout: Rollout) -> None:
    chat.rollouts.write_blocks([block(rollout, 100.0, 3)])
    since, first = chat.rollouts.blocks(rollout.id)
    assert [(one.at, one.cells[0][1].count, one.cells[0][1].bins) for one in first] == [(100.0, 3, {-51: 3})]
    late = [block(rollout, 95.0, gateway="g2"), block(rollout, 100.0, 3)]  # the second is a repetition
    chat.rollouts.write_blocks(late)
    chat.rollouts.write_blocks([block(rollout, 100.0, step=1)])
    since, more = chat.rollouts.blocks(rollout.id, since)
    assert [(one.at, one.gateway, one.step) for one in more] == [(95.0, "g2", 0), (100.0, "g1", 1)]
    assert chat.rollouts.blocks(rollout.id, since) == (since, [])


def test_blocks_of_a_rollout_that_is_over_are_gone_and_come_no_more(chat: Store, rollout: Rollout) -> None:
    chat.rollouts.write_blocks([block(rollout, 100.0)])
    chat.rollouts.change(replace(rollout, is_over=True))
    chat.rollouts.write_blocks([block(rollout, 105.0)])
    assert chat.rollouts.blocks(rollout.id) == (0, [])


def test_who_has_lost_the_lease_changes_nothing(chat: Store, rollout: Rollout) -> None:
    lease = chat.fleet.take_lease("rollouts", "a", None)
    assert lease is not None
    assert chat.fleet.take_lease("rollouts", "b", lease) is not None
    with pytest.raises(LeaseLost), chat.fleet.fenced("rollouts", lease) as execute:
        chat.rollouts.change_within(execute, rollout, shares=SharesAsked({"v1": 0.0, "v2": 1.0}))
    assert chat.routes.show("chat").weights == {"v1": 100.0, "v2": 0.0}


def test_feedback_is_read_in_the_order_of_commits_and_the_last_word_counts(chat: Store) -> None:
    assert chat.rollouts.last_feedback() == 0
    first = chat.rollouts.add_feedback("acme", "req-1", 0.0, "wrong")
    chat.rollouts.add_feedback("other", "req-1", 1.0)
    assert [(one.tenant, one.score) for one in chat.rollouts.feedback_since(0)] == [("acme", 0.0), ("other", 1.0)]
    chat.rollouts.add_feedback("acme", "req-1", 1.0)
    found = chat.rollouts.feedback_since(first.number)
    assert [(one.number, one.tenant, one.score, one.comment) for one in found] == [
        (2, "other", 1.0, ""),
        (3, "acme", 1.0, ""),
    ]
    assert chat.rollouts.last_feedback() == 3
    for score, comment in ((1.5, ""), (float("nan"), ""), (0.0, "x" * 3000), (0.0, "x\0y")):
        with pytest.raises(InvalidValue):
            chat.rollouts.add_feedback("acme", "req-2", score, comment)
