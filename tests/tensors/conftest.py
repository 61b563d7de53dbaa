from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="package")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tensors.models import save_classifier

    return save_classifier(tmp_path_factory.mktemp("models") / "classifier.onnx")
