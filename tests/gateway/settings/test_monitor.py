from __future__ import annotations

import pytest

from penstock.core.config import build
from penstock.core.errors import ConfigError
from penstock.core.request import Priority
from penstock.core.slo import Objective, Slo
from penstock.gateway.settings.gateway import GatewaySettings, admission_of
from penstock.gateway.settings.monitor import slack_of, slos_of
from penstock.watch.settings import AlertSettings


def settings(**values: object) -> GatewaySettings:
    models = {
        "plain": {"replicas": ["http://a"]},
        "quick": {"replicas": ["http://b"], "slo": {"ttft_s": 0.1, "tpot_s": None}},
        "two": {
            "versions": {
                "v1": {"weight": 1, "replicas": ["http://c"]},
                "v2": {"weight": 1, "replicas": ["http://d"], "slo": {"errors": 0.5}},
            }
        },
    }
    return build(GatewaySettings, {"models": models, **values})


def test_a_models_objectives_are_the_gateways_but_for_its_own() -> None:
    found = settings(slo={"ttft_s": 1, "errors": 0.01})
    slos = slos_of(found.slo, found.pools())
    assert slos["plain"] == Slo(ttft_s=1.0, errors=0.01)
    assert slos["quick"] == Slo(ttft_s=0.1, tpot_s=None, errors=0.01)
    assert [slos[f"two@{version}"].errors for version in ("v1", "v2")] == [0.01, 0.5]


def test_a_class_waits_by_the_models_objective_or_as_long_as_the_operator_says() -> None:
    found = settings(slo={"ttft_s": 1}, max_wait_s={"standard": 7})
    slos, classes = slos_of(found.slo, found.pools()), admission_of(found).classes
    waits = {name: [classes[one].patience_s(slos[name]) for one in Priority] for name in ("plain", "quick")}
    assert waits == {"plain": [60.0, 7.0, 300.0], "quick": [6.0, 7.0, 300.0]}
    assert [rules.patience_s(Slo()) for rules in admission_of(settings()).classes.values()] == [30.0, 60.0, 300.0]
    with pytest.raises(ConfigError, match="max_wait_s"):
        settings(max_wait_s={"fast": 1})


def test_the_defaults_are_the_promised_ones() -> None:
    slo = Slo()
    targets = {str(objective): slo.target(objective) for objective in Objective}
    assert targets == pytest.approx({"availability": 0.001, "errors": 0.001, "ttft": 0.5, "tpot": 0.1, "latency": 5.0})
    assert slo.patience_s == pytest.approx(0.2)
    assert {str(one): round(slo.allowed(one), 6) for one in Objective} == {
        "availability": 0.001,
        "errors": 0.001,
        "ttft": 0.05,
        "tpot": 0.05,
        "latency": 0.05,
    }


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"slo": {"tftt_s": 1}}, "did you mean 'slo.ttft_s'"),
        ({"slo": {"availability": 1.0}}, "slo.availability"),
        ({"slo": {"window_days": 90}}, "slo.window_days"),
        ({"watch": {"alerts": {"webhok": "x"}}}, "did you mean 'watch.alerts.webhook'"),
    ],
)
def test_a_wrong_setting_is_named(values: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        settings(**values)


def test_a_models_wrong_objective_is_named() -> None:
    found = build(GatewaySettings, {"models": {"m": {"replicas": ["http://a"], "slo": {"errors": 2}}}})
    with pytest.raises(ConfigError, match=r"models\.m\.slo\.errors"):
        slos_of(found.slo, found.pools())


def test_a_secret_address_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", "https://hooks.example/x")
    assert slack_of(AlertSettings(slack_env="HOOK")) == "https://hooks.example/x"
    monkeypatch.delenv("HOOK")
    with pytest.raises(ConfigError, match="no HOOK"):
        slack_of(AlertSettings(slack_env="HOOK"))
