"""`penstock serve` of ONNX models, as a user starts it: a repository in one process, and replicas behind a gateway."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http

from penstock.cli.serve_tensors import serve_tensors
from penstock.core.errors import ConfigError
from penstock.core.settings import EngineSettings, Settings
from tests.cli.real_server import PATIENCE_S, RealServer, real_server
from tests.tensors.models import classify, save_classifier, save_reader

pytestmark = pytest.mark.slow

ROWS = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)


def _post(server: RealServer, path: str, **body: object) -> Any:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return json.loads(response.read())


def _probabilities(server: RealServer, model: str) -> np.ndarray:
    address = server.url.removeprefix("http://")
    with contextlib.closing(tritonclient.http.InferenceServerClient(address, network_timeout=PATIENCE_S)) as client:
        tensor = tritonclient.http.InferInput("x", list(ROWS.shape), "FP32")
        tensor.set_data_from_numpy(ROWS)
        found: np.ndarray = client.infer(model, [tensor]).as_numpy("probabilities")
        return found


def test_repository_is_served_by_one_process(tmp_path: Path) -> None:
    save_classifier(tmp_path / "classifier/1/model.onnx", seed=1)
    save_classifier(tmp_path / "classifier/2/model.onnx", seed=2)
    save_reader(tmp_path / "sentiment", ["bad", "good"])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.pbtxt").write_text('backend: "python"')
    with real_server(model=str(tmp_path), forks=False, of_engine=("--threads", "1")) as server:
        assert "only onnxruntime is served" in server.banner
        assert np.allclose(_probabilities(server, "classifier"), classify(ROWS, seed=2), atol=1e-6)
        assert _post(server, "/v1/classify", model="sentiment", input="a b")["data"][0]["label"] in ("bad", "good")
        assert server.status("/health/deep") == 200
        assert server.status("/v2/models/broken") == 404
        assert f"in a browser: {server.url}" in server.banner
        assert server.status("/") == 200
        states = {one["name"]: one["state"] for one in _post(server, "/v2/repository/index")}
        assert states == {"broken": "UNAVAILABLE", "classifier": "READY", "sentiment": "READY"}
        process = server.process
    assert process.returncode == 0


def test_settings_of_engines_that_make_text_are_refused(tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "classifier.onnx")
    with pytest.raises(ConfigError, match="dtype is for models that make text"):
        serve_tensors(Settings(model=str(model), engine=EngineSettings(dtype="bfloat16")))


def test_replicas_of_a_model_are_behind_a_gateway(tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "classifier.onnx", seed=3)
    with real_server("--replicas", "2", model=str(model), forks=False, of_engine=()) as server:
        assert "tensors, over the Open Inference Protocol" in server.banner
        assert np.allclose(_probabilities(server, "classifier"), classify(ROWS, seed=3), atol=1e-6)
