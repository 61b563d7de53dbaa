"""Tiny ONNX models, made here with a dynamic batch dimension."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FEATURES, CLASSES = 4, 3
_OPSET = 17


def weights(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    dice = np.random.default_rng(seed)
    return dice.standard_normal((FEATURES, CLASSES)).astype(np.float32), np.zeros(CLASSES, np.float32)


def classify(rows: np.ndarray, seed: int = 0) -> np.ndarray:
    """What the classifier answers."""
    weight, bias = weights(seed)
    logits = rows @ weight + bias
    exp = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


def save_classifier(path: Path, seed: int = 0, batch: str | int = "batch") -> Path:
    """x FP32 [batch, 4] to probabilities FP32 [batch, 3]. `batch`: a name, or a fixed size."""
    weight, bias = weights(seed)
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["x", "weight", "bias"], ["logits"]),
            helper.make_node("Softmax", ["logits"], ["probabilities"], axis=-1),
        ],
        "classifier",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, FEATURES])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, [batch, CLASSES])],
        [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(bias, "bias")],
    )
    return save(graph, path)


def save_lookup(path: Path, rows: int = 5) -> Path:
    """ids INT64 [batch, length] to the rows of a table, FP32 [batch, length, 2]: an id that has no row fails."""
    table = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "ids"], ["found"], axis=0)],
        "lookup",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "length"])],
        [helper.make_tensor_value_info("found", TensorProto.FLOAT, ["batch", "length", 2])],
        [numpy_helper.from_array(table, "table")],
    )
    return save(graph, path)


def save_echo(path: Path, kinds: dict[str, int] | None = None) -> Path:
    """Each input [batch, n] comes out as it went in, under `out_` and its name."""
    kinds = kinds or {"text": TensorProto.STRING, "number": TensorProto.INT32}
    graph = helper.make_graph(
        [helper.make_node("Identity", [name], [f"out_{name}"]) for name in kinds],
        "echo",
        [helper.make_tensor_value_info(name, kind, ["batch", "n"]) for name, kind in kinds.items()],
        [helper.make_tensor_value_info(f"out_{name}", kind, ["batch", "n"]) for name, kind in kinds.items()],
    )
    return save(graph, path)


def save(graph: onnx.GraphProto, path: Path) -> Path:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=10)
    onnx.checker.check_model(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(path))
    return path
