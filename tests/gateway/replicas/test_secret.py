"""A gateway in front of replicas that are closed to everybody else."""

from __future__ import annotations

import pytest

from penstock.core.settings import ServerSettings
from penstock.gateway.settings.gateway import ModelSettings
from penstock.health.settings import HealthSettings
from tests.clocks import ManualClock
from tests.gateway.running import running_gateway
from tests.server.replica import NAME, serving
from tests.waiting import eventually

CLOSED = ServerSettings(gateway_secret="hush", metrics_token="scrape")


def test_a_gateway_with_the_secret_does_all_that_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports, tokens of deep probes, prompts counted with the replica's tokenizer, streams."""
    monkeypatch.setenv("REPLICA_SECRET", "hush")
    with serving(CLOSED) as replica:
        url = f"http://{replica.host}:{replica.port}"
        pools = {NAME: ModelSettings(replicas=[url], secret_env="REPLICA_SECRET")}
        patient = HealthSettings(deep_probe_every_s=1.0, deep_probe_timeout_s=1e6, silent_after_s=1e6, hung_after_s=1e6)
        clock = ManualClock()
        with running_gateway(pools=pools, health=patient, clock=clock) as gateway:

            def steps() -> int:
                gateway.call(lambda: clock.advance(1.0))
                return replica.engine.measured.load.steps

            eventually(steps, lambda found: found > 0)  # a deep probe
            stream = gateway.client("none").chat.completions.create(
                model=NAME, messages=[{"role": "user", "content": "hi"}], max_tokens=3, stream=True
            )
            assert list(stream)
            assert gateway.states() == ["ready"]
        assert replica.call("GET", "/metrics", authorization="Bearer scrape")[0] == 200


def test_a_gateway_without_it_says_what_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    with serving(CLOSED) as replica, running_gateway(replica, waits=False) as gateway:
        warned = eventually(lambda: [one.getMessage() for one in caplog.records if "secret" in one.getMessage()])
        assert warned == [f"http://{replica.host}:{replica.port} wants its gateway_secret: set models.small.secret_env"]
        assert gateway.states() == ["out"]
