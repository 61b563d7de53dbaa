"""Where a gateway's limiter is: the file, then the environment."""

from __future__ import annotations

import pytest

from penstock.gateway.settings.gateway import GatewaySettings


def test_the_environment_says_where_redis_is_unless_the_file_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_LIMITER", raising=False)
    assert GatewaySettings().limiter_url is None
    monkeypatch.setenv("PENSTOCK_LIMITER", "redis://:password@valkey:6379/0")
    assert GatewaySettings().limiter_url == "redis://:password@valkey:6379/0"
    assert GatewaySettings(limiter="redis://other:6379/0").limiter_url == "redis://other:6379/0"
    monkeypatch.setenv("PENSTOCK_LIMITER", "")
    assert GatewaySettings().limiter_url is None
