"""Pools of a model's versions, `MODEL@VERSION`: one name for clients, with weights that the gateway's settings give."""

from pathlib import Path

import msgspec
import pytest

from penstock.api.relay import SECRET_VARIABLE
from penstock.cli.fleet_process import fleet_settings, gateway_settings
from penstock.core.config import build
from penstock.core.errors import ConfigError
from penstock.fleet.settings import FleetSettings, replica_settings
from penstock.gateway.settings.gateway import pools_of, routes_of

SETTINGS = build(
    FleetSettings,
    {
        "gateway": {"models": {"tiny": {"aliases": ["default"], "versions": {"v2": {"weight": 10}}}}},
        "pools": {"tiny@v1": {"price_per_hour": 2.0}, "tiny@v2": {"model": "other"}, "plain": {}},
    },
)


def test_versions_are_pools_of_one_model() -> None:
    models = gateway_settings(SETTINGS, "sqlite:///x").pools()
    assert models.keys() == {"tiny", "plain"}
    assert models["tiny"].aliases == ["default"]
    assert models["tiny"].versions["v2"]["weight"] == 10
    pools = pools_of(models)
    assert pools.keys() == {"tiny@v1", "tiny@v2", "plain"}
    assert {pool.secret_env for pool in pools.values()} == {SECRET_VARIABLE}
    assert {name: pool.price.replica_hour for name, pool in pools.items()} == {"tiny@v1": 2, "tiny@v2": 0, "plain": 0}


def test_replicas_of_every_version_serve_the_models_name() -> None:
    found = {name: replica_settings(name, pool, SETTINGS.slo) for name, pool in SETTINGS.pool_settings().items()}
    assert {name: one.server.name for name, one in found.items()} == {
        "tiny@v1": "tiny",
        "tiny@v2": "tiny",
        "plain": "plain",
    }
    assert {name: one.model for name, one in found.items()} == {"tiny@v1": "tiny", "tiny@v2": "other", "plain": "plain"}


def weights(**pools: dict[str, object]) -> dict[str, float]:
    """Of the versions of `tiny`, at the gateway of a fleet with these pools; `_` stands for `@`."""
    named = {name.replace("_", "@"): values for name, values in pools.items()}
    models = gateway_settings(build(FleetSettings, {"pools": named}), "sqlite:///x").pools()
    assert pools_of(models).keys() == named.keys()
    return {version.name: version.weight for version in routes_of(models).find("tiny").versions}


def test_the_first_version_of_the_file_has_all_traffic_unless_the_file_says_otherwise() -> None:
    assert weights(tiny_v2={}, tiny_v1={}) == {"v2": 100.0, "v1": 0.0}
    assert weights(tiny_v1={}, other={}) == {"v1": 100.0}
    assert weights(tiny={}, tiny_v2={}) == {"base": 100.0, "v2": 0.0}
    assert weights(tiny={}) == {}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"pools": {"tiny@base": {}}}, "'base' is the version whose pool has no version in its name: call it 'tiny'"),
        ({"pools": {"tiny@v 2": {}}}, "a version has a name of letters"),
        (
            {
                "pools": {"tiny@v1": {}},
                "gateway": {"models": {"tiny": {"versions": {"v1": {"model": "tiny@v2", "weight": 1}}}}},
            },
            "a setting of replicas, and those of this version are for 'tiny@v2' to say",
        ),
        (
            {"pools": {"tiny@v1": {}}, "gateway": {"models": {"tiny": {"versions": {"v1": {"weight": 0}}}}}},
            "no version of 'tiny' has a weight",
        ),
    ],
)
def test_versions_that_its_gateway_could_not_route_are_told_when_the_fleet_starts(
    tmp_path: Path, document: dict[str, object], said: str
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_bytes(msgspec.yaml.encode(document))
    with pytest.raises(ConfigError, match=said), fleet_settings(path):
        pass
