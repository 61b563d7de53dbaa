from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.hub.watermarks import WatermarkFile
from tests.cli.real_server import RealServer, real_server, tiny_server, write_tiny_model


@pytest.fixture(scope="session")
def watermarks(tmp_path_factory: pytest.TempPathFactory) -> WatermarkFile:
    return WatermarkFile(tmp_path_factory.mktemp("marks") / "watermarks.json")


@pytest.fixture(scope="session")
def server(watermarks: WatermarkFile) -> Iterator[RealServer]:
    with real_server("--watermark-file", str(watermarks.path)) as found:
        yield found


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    write_tiny_model(path)
    return path


@pytest.fixture(scope="session")
def tiny(tiny_model: Path) -> Iterator[RealServer]:
    """A server of a random model: answers cost next to nothing, and say nothing."""
    with tiny_server(tiny_model) as found:
        yield found
