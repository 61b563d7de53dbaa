"""Models that come and go by Triton's repository calls, by tritonclient over HTTP and gRPC."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from penstock.core.errors import ConfigError
from penstock.core.settings import ServerSettings
from penstock.tensors.model_repository import ModelRepository
from penstock.tensors.repository import is_repository, is_tensor_model, models_in
from tests.tensors.models import classify, save_classifier
from tests.tensors.serving import Served, serving
from tests.waiting import eventually

ROWS = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
LABELS = ("bad", "so-so", "good")


@pytest.fixture
def root(tmp_path: Path, classifier: Path) -> Path:
    for name in ("first", "second"):
        (tmp_path / name / "1").mkdir(parents=True)
        shutil.copy(classifier, tmp_path / name / "1/model.onnx")
    return tmp_path


@pytest.fixture
def served(root: Path) -> Iterator[Served]:
    with serving(root, paths=lambda: models_in(root)) as found:
        yield found


@pytest.fixture(params=["grpc", "http"])
def client(request: pytest.FixtureRequest, served: Served) -> Iterator[tuple[Any, Any]]:
    ports = served.ports
    kind = tritonclient.grpc if request.param == "grpc" else tritonclient.http
    with contextlib.closing(ports.grpc_client if request.param == "grpc" else ports.http_client) as found:
        yield found, kind


def states(client: Any) -> dict[tuple[str, str], str]:
    found = client.get_model_repository_index()
    rows = (
        found
        if isinstance(found, list)
        else [{"name": m.name, "version": m.version, "state": m.state} for m in found.models]
    )
    return {(row["name"], row["version"]): row["state"] for row in rows}


def answer(client: Any, kind: Any, name: str) -> np.ndarray:
    tensor = kind.InferInput("x", list(ROWS.shape), "FP32")
    tensor.set_data_from_numpy(ROWS)
    found: np.ndarray = client.infer(name, [tensor]).as_numpy("probabilities")
    return found


def test_models_are_loaded_anew_and_unloaded(client: tuple[Any, Any], root: Path) -> None:
    asked, kind = client
    assert states(asked) == {("first", "1"): "READY", ("second", "1"): "READY"}
    assert np.allclose(answer(asked, kind, "first"), classify(ROWS), atol=1e-6)

    save_classifier(root / "first/2/model.onnx", seed=2)
    save_classifier(root / "third/1/model.onnx", seed=3)
    asked.load_model("first")
    asked.load_model("third")
    assert np.allclose(answer(asked, kind, "first"), classify(ROWS, seed=2), atol=1e-6)
    assert np.allclose(answer(asked, kind, "third"), classify(ROWS, seed=3), atol=1e-6)
    assert states(asked) == {(name, "2" if name == "first" else "1"): "READY" for name in ("first", "second", "third")}

    asked.unload_model("second")
    assert states(asked)["second", ""] == "UNAVAILABLE"
    assert not asked.is_model_ready("second")
    with pytest.raises(InferenceServerException, match="not loaded"):
        answer(asked, kind, "second")
    asked.load_model("second", config=json.dumps({"max_batch_size": 2}))
    with pytest.raises(InferenceServerException, match="1 to 2"):
        answer(asked, kind, "second")


@pytest.mark.parametrize(
    ("call", "body", "status", "why"),
    [
        ("nobody/load", {}, 404, "no model 'nobody'"),
        ("nobody/unload", {}, 404, "no model 'nobody'"),
        ("first/load", {"parameters": {"file:1/model.onnx": "AAAA"}}, 400, "disk alone"),
        ("first/load", {"parameters": {"config": "{"}}, 400, "not valid JSON"),
        ("first/load", {"parameters": {"config": '{"max_batch": 2}'}}, 400, "did you mean 'max_batch_size'"),
        ("first/load", {"parameters": {"config": '{"max_batch_size": 2}', "x": 1}}, 400, "'x'"),
        ("first/unload", {"parameters": {"x": True}}, 400, "'x'"),
        ("first/load", {"other": 1}, 400, "other"),
        ("../first/load", {}, 404, "no model"),
    ],
)
def test_orders_that_make_no_sense_change_nothing(
    served: Served, call: str, body: dict[str, Any], status: int, why: str
) -> None:
    found, told = served.call("POST", f"/v2/repository/models/{call}", body)
    assert (found, why in told["error"]) == (status, True), told
    index = served.call("POST", "/v2/repository/index", {"ready": True})[1]
    assert [(one["name"], one["state"]) for one in index] == [("first", "READY"), ("second", "READY")]


def test_orders_are_for_those_who_know_the_secret(root: Path) -> None:
    with serving(root, ServerSettings(gateway_secret="s3cret"), lambda: models_in(root)) as served:
        assert served.call("POST", "/v2/repository/models/first/unload", {})[0] in (401, 403)
        with contextlib.closing(served.ports.grpc_client) as client:
            with pytest.raises(InferenceServerException):
                client.unload_model("first")
            client.unload_model("first", headers={"authorization": "Bearer s3cret"})
        eventually(lambda: list(served.replica.repository.loaded) == ["second"])


def test_orders_of_foreign_web_pages_are_refused(served: Served) -> None:
    for headers in ({"Origin": "https://elsewhere.example"}, {"Host": "elsewhere.example"}):
        for call in ("unload", "load"):
            assert served.call("POST", f"/v2/repository/models/first/{call}", {}, **headers)[0] == 403
    assert list(served.replica.repository.loaded) == ["first", "second"]


def test_broken_model_costs_the_others_nothing(root: Path) -> None:
    (root / "second/1/model.onnx").write_bytes(b"no model")
    (root / "third").mkdir()
    (root / "third/config.pbtxt").write_text('backend: "python"')
    with serving(root, paths=lambda: models_in(root)) as served:
        index = served.call("POST", "/v2/repository/index", {})[1]
        assert [one["state"] for one in index] == ["READY", "UNAVAILABLE", "UNAVAILABLE"]
        assert "only onnxruntime" in index[2]["reason"]
        assert served.call("POST", "/v2/repository/models/second/load", {})[0] >= 400
        shutil.copy(root / "first/1/model.onnx", root / "second/1/model.onnx")
        assert served.call("POST", "/v2/repository/models/second/load", {})[0] == 200
        assert served.call("GET", "/v2/models/second/ready")[0] == 200


async def test_repository_without_a_model_that_can_be_loaded_says_why(root: Path) -> None:
    for name in ("first", "second"):
        (root / name / "config.yaml").write_text("max_batch: 2")
    repository = ModelRepository(lambda: models_in(root))
    with pytest.raises(ConfigError, match="did you mean 'max_batch_size'"):
        await repository.load_all()
    assert repository.loaded == {}


def test_kinds_of_directories_are_told_apart(root: Path) -> None:
    assert is_repository(str(root))
    assert not is_tensor_model(str(root))
    assert is_tensor_model(str(root / "first"))
    assert not is_repository(str(root / "first"))
    hub = root / "hub"
    shutil.copytree(root / "first/1", hub / "onnx")
    assert is_tensor_model(str(hub))
    (hub / "model.safetensors").touch()
    assert not is_tensor_model(str(hub))


def test_likeliest_classes_come_by_their_names(tmp_path: Path, classifier: Path) -> None:
    path = tmp_path / "named"
    (path / "1").mkdir(parents=True)
    shutil.copy(classifier, path / "1/model.onnx")
    (path / "labels.txt").write_text("\n".join(LABELS))
    output = {"name": "probabilities", "data_type": "TYPE_FP32", "dims": [3], "label_filename": "labels.txt"}
    (path / "config.yaml").write_text(json.dumps({"max_batch_size": 4, "output": [output]}))
    with serving(path) as served:
        for kind, made in ((tritonclient.grpc, "grpc_client"), (tritonclient.http, "http_client")):
            with contextlib.closing(getattr(served.ports, made)) as client:
                tensor = kind.InferInput("x", list(ROWS.shape), "FP32")
                tensor.set_data_from_numpy(ROWS)
                wanted = kind.InferRequestedOutput("probabilities", class_count=2)
                found = client.infer("named", [tensor], outputs=[wanted]).as_numpy("probabilities")
                assert found.shape == (3, 2)
                for row, values in zip(found, classify(ROWS), strict=True):
                    value, number, label = row[0].decode().split(":")
                    assert (int(number), label) == (values.argmax(), LABELS[values.argmax()])
                    assert float(value) == pytest.approx(values.max(), abs=1e-5)
