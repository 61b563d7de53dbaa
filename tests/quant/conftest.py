from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.seeded import seeded

if TYPE_CHECKING:
    from tests.quant.runs import Runs

__all__ = ["seeded"]  # the fixture


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    from tests.quant.runs import Runs  # with transformers, and every worker reads every conftest.py

    return Runs(tmp_path_factory.mktemp("quantized"))
