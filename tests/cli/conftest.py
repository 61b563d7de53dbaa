from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.hub.watermarks import WatermarkFile

if TYPE_CHECKING:
    from tests.cli.real_server import RealServer


@pytest.fixture(scope="session")
def watermarks(tmp_path_factory: pytest.TempPathFactory) -> WatermarkFile:
    return WatermarkFile(tmp_path_factory.mktemp("marks") / "watermarks.json")


@pytest.fixture(scope="session")
def server(watermarks: WatermarkFile) -> Iterator[RealServer]:
    from tests.cli.real_server import real_server

    with real_server("--watermark-file", str(watermarks.path)) as found:
        yield found


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.cli.real_server import write_tiny_model

    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    write_tiny_model(path)
    return path


@pytest.fixture(scope="session")
def tiny(tiny_model: Path) -> Iterator[RealServer]:
    """A server of a random model: answers cost next to nothing, and say nothing."""
    from tests.cli.real_server import tiny_server

    with tiny_server(tiny_model) as found:
        yield found
