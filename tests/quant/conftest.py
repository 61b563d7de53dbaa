import pytest

from tests.quant.runs import Runs
from tests.seeded import seeded

__all__ = ["seeded"]  # the fixture


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("quantized"))
