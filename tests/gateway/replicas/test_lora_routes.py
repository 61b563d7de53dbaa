from penstock.gateway.replicas.lora_routes import LearnedAdapters
from penstock.gateway.settings.gateway import ModelSettings, routes_of


def test_a_learned_name_is_the_configurations_where_it_has_one_and_nobodys_where_it_is_two() -> None:
    table = routes_of(
        {
            "m": ModelSettings(replicas=["http://x"], aliases=["short"], adapters={"named": "/a"}),
            "n": ModelSettings(
                versions={"v1": {"replicas": ["http://y"], "weight": 1}, "v2": {"replicas": ["http://z"]}}
            ),
        }
    )
    learned = LearnedAdapters()
    assert not learned.hear("x", "m", frozenset())
    assert learned.over(table) is table
    assert learned.hear("x", "m", frozenset({"named", "short", "n", "n@v1", "both", "own"}))
    assert not learned.hear("x", "m", frozenset({"named", "short", "n", "n@v1", "both", "own"}))
    learned.hear("y", "n@v1", frozenset({"both", "other"}))
    learned.hear("z", "n@v2", frozenset({"other", "shadowed"}))  # a version that nobody is sent to
    found = learned.over(table)
    new = {name: route for name, route in found.routes.items() if name not in table.routes}
    assert {name: route.adapter_of for name, route in new.items()} == {"other": "n", "own": "m"}
    assert [share.pool for share in new["other"].pools] == ["n@v1"]
    assert found.find("short").name == "m"
