"""Pools of a model's versions, `MODEL@VERSION`: one name for clients, with weights that the gateway's settings give."""

from penstock.api.relay import SECRET_VARIABLE
from penstock.cli.fleet_process import gateway_settings
from penstock.core.config import build
from penstock.fleet.settings import FleetSettings, replica_settings
from penstock.gateway.settings.gateway import pools_of

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
