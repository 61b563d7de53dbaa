"""Replicas of `serve --replicas N` as their keeper starts them: real processes that end before they load anything."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.cli.replicas import _keep, _write_config
from penstock.core.errors import KeyNotFound
from penstock.core.settings import EngineSettings, ServerSettings, Settings
from penstock.engine.messages import EngineInfo
from tests.cli.real_server import write_tiny_model


def never(info: EngineInfo) -> None:
    raise AssertionError("it cannot become ready")


@pytest.mark.slow
def test_replica_that_cannot_be_started_is_not_started_again(tmp_path: Path) -> None:
    """Its own words end everything: a watermark that nobody has made cannot heal."""
    write_tiny_model(tmp_path)
    server = ServerSettings(watermark="nosuch", watermark_file=str(tmp_path / "watermarks.json"))
    settings = Settings(model=str(tmp_path), engine=EngineSettings(load="dummy"), server=server)
    config = _write_config(settings, "tiny", 0, 2, tmp_path)
    with pytest.raises(KeyNotFound, match="there is no watermark 'nosuch'"):
        asyncio.run(_keep(config, never))
