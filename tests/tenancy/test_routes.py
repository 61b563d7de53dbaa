"""One contract, on real SQLite and on real PostgreSQL."""

from __future__ import annotations

import threading

import pytest

from penstock.core.errors import Conflict, InvalidValue, ModelNotFound
from penstock.tenancy.follower import Follower
from penstock.tenancy.routes import Declared, RouteRevision, SharesAsked
from penstock.tenancy.store import Store, open_store
from tests.waiting import eventually

CHAT = Declared("chat", {"v1": 90.0, "v2": 10.0}, {"v1": 0.0, "v2": 0.0})


@pytest.fixture
def chat(store: Store) -> Store:
    store.routes.declare([CHAT])
    return store


def weights(store: Store) -> dict[str, float]:
    return store.routes.show("chat").weights


def test_until_something_is_changed_the_file_counts(chat: Store) -> None:
    assert weights(chat) == {"v1": 90.0, "v2": 10.0}
    assert (chat.routes.show("chat").last.revision, chat.routes.history("chat"), chat.changes().routes) == (0, [], ())
    chat.routes.declare([Declared("chat", {"v1": 50.0, "v2": 50.0}, {})])
    assert weights(chat) == {"v1": 50.0, "v2": 50.0}


def test_a_change_is_kept_over_what_the_file_says(chat: Store) -> None:
    chat.routes.change("chat", SharesAsked({"v2": 25.0}, {"v2": 0.5}), by="root")
    assert weights(chat) == {"v1": 90.0, "v2": 25.0}
    chat.routes.declare([Declared("chat", {"v1": 70.0, "v2": 30.0, "v3": 1.0}, {"v1": 0.0, "v2": 0.0, "v3": 0.0})])
    assert weights(chat) == {"v1": 70.0, "v2": 25.0, "v3": 1.0}
    assert chat.routes.show("chat").shadow == {"v1": 0.0, "v2": 0.5, "v3": 0.0}
    chat.routes.change("chat", SharesAsked({"v2": None}))
    assert weights(chat) == {"v1": 70.0, "v2": 30.0, "v3": 1.0}


def test_to_promote_is_to_give_one_everything(chat: Store) -> None:
    chat.routes.promote("chat", "v2")
    assert weights(chat) == {"v1": 0.0, "v2": 100.0}


def test_to_roll_back_is_to_be_as_before_and_again_as_before_that(chat: Store) -> None:
    chat.routes.change("chat", SharesAsked({"v1": 80.0, "v2": 20.0}))
    chat.routes.promote("chat", "v2")
    for expected in ({"v1": 80.0, "v2": 20.0}, {"v1": 90.0, "v2": 10.0}):
        chat.routes.roll_back("chat")
        assert weights(chat) == expected
    with pytest.raises(Conflict, match="nothing before"):
        chat.routes.roll_back("chat")
    actions = [one.action for one in chat.routes.history("chat")]
    assert actions == ["rollback to the file", "rollback to 1", "promote v2", "weights"]


def test_what_was_rolled_back_and_changed_anew_is_rolled_back_to_where_that_began(chat: Store) -> None:
    chat.routes.change("chat", SharesAsked({"v1": 80.0, "v2": 20.0}))
    chat.routes.promote("chat", "v2")
    chat.routes.roll_back("chat")
    chat.routes.change("chat", SharesAsked({"v2": 40.0}))
    chat.routes.roll_back("chat")
    assert weights(chat) == {"v1": 80.0, "v2": 20.0}
    chat.routes.roll_back("chat")
    assert weights(chat) == {"v1": 90.0, "v2": 10.0}


def test_any_revision_can_be_said_again(chat: Store) -> None:
    first = chat.routes.change("chat", SharesAsked({"v2": 20.0})).last.revision
    chat.routes.promote("chat", "v2")
    assert chat.routes.roll_back("chat", first).weights == {"v1": 90.0, "v2": 20.0}
    assert chat.routes.roll_back("chat", 0).weights == {"v1": 90.0, "v2": 10.0}
    with pytest.raises(InvalidValue, match="no revision 99"):
        chat.routes.roll_back("chat", 99)


def test_what_cannot_be_is_refused_and_changes_nothing(chat: Store) -> None:
    with pytest.raises(ModelNotFound, match="did you mean 'chat'"):
        chat.routes.promote("chta", "v1")
    with pytest.raises(InvalidValue, match="no version 'v3'"):
        chat.routes.change("chat", SharesAsked({"v3": 1.0}))
    with pytest.raises(InvalidValue, match="no version"):
        chat.routes.promote("chat", "v9")
    with pytest.raises(InvalidValue, match="would have a weight"):
        chat.routes.change("chat", SharesAsked({"v1": 0.0, "v2": 0.0}))
    assert (chat.changes().revision, chat.routes.history("chat")) == (0, [])


def test_who_follows_hears_the_last_word_on_each(chat: Store) -> None:
    chat.routes.declare([Declared("other", {"a": 1.0, "b": 1.0}, {})])
    chat.routes.promote("other", "a")
    chat.routes.promote("chat", "v1")
    chat.routes.promote("chat", "v2")
    changes = chat.changes()
    assert {one.name: one.action for one in changes.routes} == {"other": "promote a", "chat": "promote v2"}
    chat.add_tenant({"id": "acme"})
    assert chat.changes(changes.revision).routes == ()


def test_a_follower_is_told(chat: Store, store_url: str) -> None:
    heard: list[RouteRevision] = []
    told = threading.Event()

    def apply(found: object) -> None:
        heard.extend(found)  # type: ignore[arg-type]
        told.set()

    chat.routes.promote("chat", "v1")
    with Follower(open_store(store_url), lambda _: None, apply_routes=apply):
        assert [one.action for one in heard] == ["promote v1"]
        told.clear()
        chat.routes.roll_back("chat")
        eventually(told.is_set)
    assert heard[-1].action == "rollback to the file"


def test_no_copies_are_sent_to_versions_that_are_pipelines(store: Store) -> None:
    store.routes.declare([Declared("triage", {"v1": 1.0, "v2": 0.0}, {"v1": 0.0, "v2": 0.0}, has_copies=False)])
    with pytest.raises(InvalidValue, match="'triage' has versions that are pipelines"):
        store.routes.change("triage", SharesAsked(shadow={"v2": 0.1}))
    assert store.routes.change("triage", SharesAsked(weights={"v2": 9.0}, shadow={"v2": None})).weights["v2"] == 9.0


def test_versions_that_no_file_names_are_added_beside_the_others_without_traffic(store: Store) -> None:
    first = Declared("new", {"base": 100.0}, {"base": 0.0})
    assert store.routes.add_versions([first]) == [first]
    both = Declared("new", {"base": 100.0, "v2": 0.0}, {"base": 0.0, "v2": 0.0})
    assert store.routes.add_versions([Declared("new", {"v2": 100.0}, {"v2": 1.0}), CHAT]) == [both, CHAT]
    assert store.routes.add_versions([first]) == [both]
    assert store.routes.change("new", SharesAsked(weights={"v2": 50.0})).weights == {"base": 100.0, "v2": 50.0}
    assert weights(store) == {"v1": 90.0, "v2": 10.0}
