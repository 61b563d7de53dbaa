"""Exposure of a replica to others, as `penstock serve` and `penstock engine` set it up."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from penstock.api.relay import SECRET_VARIABLE
from penstock.cli.replicas import _write_config, shared_secret
from penstock.cli.serve import listen, with_secrets
from penstock.core.config import build
from penstock.core.errors import ConfigError
from penstock.core.settings import ServerSettings, Settings


@pytest.mark.parametrize(
    ("host", "secret", "warns"),
    [("0.0.0.0", None, True), ("0.0.0.0", "s", False), ("127.0.0.1", None, False), ("127.0.0.2", None, False)],
)
def test_a_replica_that_is_open_beyond_its_machine_says_so(
    host: str, secret: str | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    listen(Settings(server=ServerSettings(host=host, port=0, gateway_secret=secret))).close()
    assert ["gateway_secret" in record.getMessage() for record in caplog.records] == [True] * warns


def test_secrets_come_from_the_environment_where_nothing_else_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_GATEWAY_SECRET", "s")
    monkeypatch.setenv("PENSTOCK_METRICS_TOKEN", "m")
    found = with_secrets(ServerSettings())
    assert (found.gateway_secret, found.metrics_token) == ("s", "m")
    found = with_secrets(ServerSettings(gateway_secret="own"))
    assert (found.gateway_secret, found.metrics_token) == ("own", "m")


def test_a_gateway_and_the_replicas_that_it_starts_share_a_secret_that_no_file_and_no_argument_shows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "")
    with shared_secret(None):
        first = os.environ[SECRET_VARIABLE]
        assert len(first) > 40
        with shared_secret(None):
            assert os.environ[SECRET_VARIABLE] == first
    with shared_secret(None):
        assert os.environ[SECRET_VARIABLE] != first
    settings = Settings(server=ServerSettings(host="0.0.0.0", gateway_secret="chosen"))
    written = _write_config(settings, "m", 9001, "both", 2, tmp_path).read_text()
    assert "chosen" not in written
    replica = build(Settings, json.loads(written)).server
    assert (replica.host, replica.port) == ("127.0.0.1", 9001)
    with shared_secret("chosen"):
        assert with_secrets(replica).gateway_secret == "chosen"
    assert os.environ[SECRET_VARIABLE] == ""
    monkeypatch.delenv(SECRET_VARIABLE)
    with pytest.raises(ConfigError), shared_secret(None):
        raise ConfigError("it cannot be served")
    assert SECRET_VARIABLE not in os.environ, "what this process starts later has nothing to do with it"
