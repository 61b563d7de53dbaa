import pytest

from penstock.core.errors import ConfigError, ModelNotFound
from penstock.router.routes import Failure, Fallback, PoolShare, Route, RouteTable, Target, Version
from penstock.router.rules import RuleSet

TABLE = RouteTable(
    [
        Route(
            "chat",
            versions=(Version("v1", 0.9, pool="chat-v1"), Version("v2", 0.1, pool="chat-v2")),
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
    assert {TABLE.find("chat@v2").target(random01).pool for random01 in (0.0, 0.5, 0.99)} == {"chat-v2"}


def test_a_name_that_is_none_gets_a_hint_from_what_may_be_seen() -> None:
    with pytest.raises(ModelNotFound, match="did you mean 'chat'"):
        TABLE.find("chatt")
    with pytest.raises(ModelNotFound) as caught:
        TABLE.find("chatt", visible=["long"])
    assert "chat'?" not in caught.value.message


def test_pools_share_a_route_by_weight() -> None:
    picks = [TABLE.find("chat").target(i / 1000).pool for i in range(1000)]
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
    assert {changed.find("gpt-4o").target(i / 10).pool for i in range(10)} == {"chat-v2"}
    assert changed.find("chat@v1").target(0.5).pool == "chat-v1"
    assert changed.find("chat").shadows(0.5, "chat@v2") == [Target("chat-v1", "chat@v1")]
    assert changed.find("chat").shadows(0.5, "chat@v1") == []
    assert (changed.find("chat").revision, TABLE.find("chat").revision) == (7, 0)
    assert TABLE.find("chat").target(0.5).pool == "chat-v1"
    assert after(Failure.ERROR, "chat") == "backup"


def test_weights_for_versions_that_are_not_here_or_come_to_nothing_change_nothing() -> None:
    chat = TABLE.find("chat")
    assert chat.with_shares({"v9": 5.0}, {}, 3).pools == chat.pools
    assert chat.with_shares({"v1": 0.0, "v2": 0.0}, {}, 3) is chat


# -- versions that have no pool of their own

LLAMA = Route("llama", (PoolShare("llama"),))
SUPPORT = Route(
    "support",
    versions=(
        Version("v1", 0.9, of="llama", adapter="october"),
        Version("v2", 0.1, shadow=0.5, of="llama", adapter="november"),
    ),
    adapter_of="llama",
)


def test_versions_on_the_same_replicas_are_told_apart_by_their_adapters() -> None:
    table = RouteTable([LLAMA, SUPPORT])
    picks = [table.find("support").target(i / 1000) for i in range(1000)]
    old, new = Target("llama", "support@v1", "october"), Target("llama", "support@v2", "november")
    assert (picks.count(old), picks.count(new)) == (pytest.approx(900, abs=1), pytest.approx(100, abs=1))
    assert {table.find("support@v2").target(i / 10) for i in range(10)} == {new}
    assert table.find("support").targets() == [old, new]
    copied = [bool(table.find("support").shadows(i / 1000, "support@v1")) for i in range(1000)]
    assert copied.count(True) == pytest.approx(500, abs=50)
    assert [table.find(name).model for name in ("support", "support@v2")] == ["support", "support"]
    changed = table.with_routes([table.find("support").with_shares({"v1": 0.0, "v2": 1.0}, {}, 1)])
    assert {changed.find("support").target(i / 10) for i in range(10)} == {new}


def test_a_version_on_another_models_replicas_follows_that_ones_shares() -> None:
    base = Route("llama", versions=(Version("a", 1.0, pool="llama@a"), Version("b", 0.0, pool="llama@b")))
    table = RouteTable([base, SUPPORT])
    assert {table.find("support").target(i / 100).pool for i in range(100)} == {"llama@a"}
    both = table.with_routes([base.with_shares({"b": 1.0}, {}, 1)])
    picks = [both.find("support").target(i / 1000) for i in range(1000)]
    assert sum(pick.version == "support@v2" for pick in picks) == pytest.approx(100, abs=1)
    for version, count in (("support@v1", 450), ("support@v2", 50)):  # each of them is halved
        assert sum(pick[:2] == ("llama@b", version) for pick in picks) == pytest.approx(count, abs=60 * count / 450)


def test_a_version_may_be_a_model_and_the_next_an_adapter_on_one_version_of_it() -> None:
    on_first = Version("v2", 0.0, of="llama@v1", adapter="november")
    own = Route("llama", versions=(Version("v1", 1.0, pool="llama@v1"), on_first))
    table = RouteTable([own, Route("poet", adapter_of="llama")])
    assert table.find("llama").target(0.5) == Target("llama@v1", "llama@v1")
    assert table.find("llama@v2").target(0.5) == Target("llama@v1", "llama@v2", "november")
    promoted = table.with_routes([own.with_shares({"v1": 0.0, "v2": 1.0}, {}, 1)])
    assert promoted.find("llama").target(0.5) == Target("llama@v1", "llama@v2", "november")
    assert promoted.find("poet").target(0.5) == Target("llama@v1", "llama@v1", "poet")
    assert promoted.find("poet").targets() == [Target("llama@v1", "llama@v1", "poet")]


def test_a_version_with_replicas_of_its_own_may_have_an_adapter_on_them() -> None:
    table = RouteTable([Route("m", versions=(Version("v1", 1.0, pool="m@v1", adapter="poet"),))])
    assert table.find("m").target(0.5) == Target("m@v1", "m@v1", "poet")


def test_versions_may_be_pipelines() -> None:
    versions = (Version("v1", 1.0, pipeline="a"), Version("v2", 0.0, pipeline="b"))
    table = RouteTable([Route("triage", versions=versions, is_pipeline=True)])
    assert table.find("triage").target(0.5) == Target("", "triage@v1", "", "a")
    assert table.find("triage@v2").target(0.5) == Target("", "triage@v2", "", "b")
    assert table.find("triage").targets() == [Target("", "triage@v1", "", "a")]
    with pytest.raises(ConfigError, match="'triage@v2', which is a pipeline"):
        table.with_routes([Route("m", (PoolShare("m"),), fallbacks=(Fallback("triage@v2"),))])


@pytest.mark.parametrize("of", ["nobody", "llama@v9", "support", "poet", "auto"])
def test_a_version_on_replicas_that_there_are_not_is_refused(of: str) -> None:
    others = [LLAMA, SUPPORT, Route("poet", adapter_of="llama"), Route("auto", rules=RuleSet([], "llama"))]
    with pytest.raises(ConfigError, match=f"'v1' of 'm' is on replicas of '{of}', which has none of its own"):
        RouteTable([*others, Route("m", versions=(Version("v1", 1.0, of=of),))])


def test_an_adapter_version_is_where_replicas_were_found_to_have_it() -> None:
    base = Route("llama", versions=(Version("a", 1.0, pool="llama@a"), Version("b", 1.0, pool="llama@b")))
    table = RouteTable([base, SUPPORT])
    found = table.with_routes([Route("november", (PoolShare("llama@b"),), adapter_of="llama")])
    assert {found.find("support@v2").target(i / 20).pool for i in range(20)} == {"llama@b"}
    assert {found.find("support@v1").target(i / 20).pool for i in range(20)} == {"llama@a", "llama@b"}
