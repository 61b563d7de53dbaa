"""What an operator may write of versions: pools, adapters on another model's replicas, pipelines."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.errors import ConfigError
from penstock.gateway.pipelines.service import with_pipelines
from penstock.gateway.settings.gateway import GatewaySettings, pools_of, routes_of
from penstock.gateway.settings.route_board import RouteBoard
from penstock.router.routes import RouteTable, Target

URL = "http://a"


def table(**models: dict[str, Any]) -> RouteTable:
    return routes_of(GatewaySettings(models=models).pools())


def checked(models: dict[str, dict[str, Any]]) -> None:
    found = GatewaySettings(models=models).pools()
    pools_of(found)
    with_pipelines(routes_of(found), [])


def test_adapters_of_one_model_are_versions_of_a_route_without_replicas() -> None:
    models = GatewaySettings(
        models={
            "llama": {"replicas": [URL], "adapters": {"october": "/a"}},
            "support": {
                "versions": {
                    "v1": {"adapter": "october", "weight": 100},
                    "v2": {"model": "llama", "adapter": "november"},
                    "v3": {"model": "llama"},
                }
            },
        }
    ).pools()
    assert pools_of(models).keys() == {"llama"}
    found = routes_of(models)
    assert [found.find(f"support@v{n}").target(0.5) for n in (1, 2, 3)] == [
        Target("llama", "support@v1", "october"),
        Target("llama", "support@v2", "november"),
        Target("llama", "support@v3"),
    ]
    assert found.find("support").adapter_of == "llama"  # whoever may not use its adapters may not use it
    (declared,) = RouteBoard(found).declared()
    assert (declared.weights, declared.has_copies) == ({"v1": 100.0, "v2": 0.0, "v3": 0.0}, True)


def test_an_adapter_on_the_models_own_replicas_is_a_version_of_a_model() -> None:
    found = table(
        llama={"versions": {"v1": {"replicas": [URL], "weight": 1}, "v2": {"model": "llama@v1", "adapter": "november"}}}
    )
    assert found.find("llama").adapter_of is None
    assert found.find("llama@v2").target(0.5) == Target("llama@v1", "llama@v2", "november")


def test_a_pool_of_its_own_may_have_an_adapter() -> None:
    models = {"m": {"versions": {"v1": {"replicas": [URL], "adapter": "poet", "weight": 1}}}}
    assert table(**models).find("m").target(0.5) == Target("m@v1", "m@v1", "poet")


@pytest.mark.parametrize(
    ("versions", "said", "param"),
    [
        ({"v1": {"adapter": "x", "weight": 1}}, "'x' is: it is in no model's adapters", "v1.adapter"),
        ({"v1": {"model": "none", "weight": 1}}, "'none', which has none of its own", "v1"),
        ({"v1": {"model": "m", "weight": 1}}, "cannot be a version of itself.*m@v1", "v1.model"),
        ({"v1": {"model": "a", "pipeline": "p", "weight": 1}}, "name one of the two", "v1.pipeline"),
        ({"v1": {"pipeline": "p", "weight": 1}}, "'p' is no pipeline", "v1.pipeline"),
        ({"v1": {"model": "a", "replicas": [URL], "weight": 1}}, "for 'a' to say", "v1.replicas"),
        ({"v1": {"pipeline": "p", "price": {"input": 1}, "weight": 1}}, "for 'p' to say", "v1.price"),
        ({"v1": {"replicas": [URL], "weight": 1}, "v2": {"adapter": "own"}}, "as m@v1", "v2.adapter"),
        ({"v1": {"adapter": "x1", "weight": 1}, "v2": {"adapter": "x2"}}, "adapters of a and b", ""),
        ({"v1": {"replicas": [URL], "shadow": 0.1}, "v2": {"pipeline": "p", "weight": 1}}, "not copied", "v1.shadow"),
    ],
)
def test_versions_that_cannot_be_are_refused(versions: dict[str, Any], said: str, param: str) -> None:
    adapters = {"own": None} if "own" in str(versions) else {}
    models = {
        "a": {"replicas": [URL], "adapters": {"x1": None}},
        "b": {"replicas": [URL], "adapters": {"x2": None}},
        "m": {"versions": versions, "adapters": adapters},
    }
    with pytest.raises(ConfigError, match=said) as caught:
        checked(models)
    assert caught.value.param is not None
    assert caught.value.param.endswith(f"m.versions{'.' if param else ''}{param}")
