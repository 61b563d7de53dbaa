import pytest

from penstock.core.errors import ConfigError, ModelNotFound
from penstock.router.routes import Failure, Fallback, PoolShare, Route, RouteTable

TABLE = RouteTable(
    [
        Route(
            "chat",
            (PoolShare("chat-v1", 0.9), PoolShare("chat-v2", 0.1)),
            versions={"v1": "chat-v1", "v2": "chat-v2"},
            aliases=("gpt-4o",),
            fallbacks=(
                Fallback("long", frozenset({Failure.CONTEXT_LENGTH})),
                Fallback("backup", frozenset({Failure.ERROR, Failure.SLOW})),
                Fallback("provider"),
            ),
            slow_after_s=2.0,
        ),
        Route("long", (PoolShare("long"),), fallbacks=(Fallback("provider"),)),
        Route("backup", (PoolShare("backup"),)),
        Route("provider", (PoolShare("openai/gpt-4o"),)),
    ]
)


def after(failure: Failure, *tried: str) -> str | None:
    route = TABLE.next_after(failure, tried)
    return route.name if route else None


def test_a_model_is_found_by_name_alias_and_version() -> None:
    assert TABLE.find("chat") is TABLE.find("gpt-4o")
    assert {TABLE.find("chat@v2").pool(random01) for random01 in (0.0, 0.5, 0.99)} == {"chat-v2"}


def test_a_name_that_is_none_gets_a_hint_from_what_may_be_seen() -> None:
    with pytest.raises(ModelNotFound, match="did you mean 'chat'"):
        TABLE.find("chatt")
    with pytest.raises(ModelNotFound) as caught:
        TABLE.find("chatt", visible=["long"])
    assert "chat'?" not in caught.value.message


def test_pools_share_a_route_by_weight() -> None:
    picks = [TABLE.find("chat").pool(i / 1000) for i in range(1000)]
    assert picks.count("chat-v2") == pytest.approx(100, abs=1)


def test_each_failure_has_its_own_way_through_the_chain() -> None:
    assert after(Failure.CONTEXT_LENGTH, "chat") == "long"
    assert after(Failure.ERROR, "chat") == "backup"
    assert after(Failure.SLOW, "gpt-4o") == "backup"
    assert after(Failure.ERROR, "chat", "backup") == "provider"
    assert after(Failure.CONTEXT_LENGTH, "chat", "long") == "provider"
    assert after(Failure.ERROR, "chat@v2") == "backup"


def test_a_chain_ends_and_never_goes_round() -> None:
    assert after(Failure.ERROR, "chat", "backup", "provider") is None
    assert after(Failure.ERROR, "backup") is None
    assert after(Failure.CONTEXT_LENGTH, "chat", "long", "provider") is None


def test_a_table_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="no route"):
        RouteTable([Route("a", (PoolShare("a"),), fallbacks=(Fallback("b"),))])
    with pytest.raises(ConfigError, match="two routes"):
        RouteTable([Route("a", (PoolShare("a"),)), Route("b", (PoolShare("b"),), aliases=("a",))])


def test_weights_that_change_make_another_table_and_leave_the_first_as_it_was() -> None:
    chat = TABLE.find("chat")
    changed = TABLE.with_routes([chat.with_shares({"v2": 100.0, "v1": 0.0}, {"v1": 1.0}, revision=7)])
    assert {changed.find("gpt-4o").pool(i / 10) for i in range(10)} == {"chat-v2"}
    assert changed.find("chat@v1").pool(0.5) == "chat-v1"
    assert changed.find("chat").shadows(0.5, "chat-v2") == ["chat-v1"]
    assert changed.find("chat").shadows(0.5, "chat-v1") == []
    assert (changed.find("chat").revision, TABLE.find("chat").revision) == (7, 0)
    assert TABLE.find("chat").pool(0.5) == "chat-v1"
    assert after(Failure.ERROR, "chat") == "backup"


def test_weights_for_versions_that_are_not_here_or_come_to_nothing_change_nothing() -> None:
    chat = TABLE.find("chat")
    assert chat.with_shares({"v9": 5.0}, {}, 3).pools == chat.pools
    assert chat.with_shares({"v1": 0.0, "v2": 0.0}, {}, 3) is chat
