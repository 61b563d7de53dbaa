"""Tiny ONNX models, made here with a dynamic batch dimension."""

from __future__ import annotations

import json
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
    """Returns what the classifier answers."""
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


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghij"]
WIDTH = 6


def table(seed: int = 0) -> np.ndarray:
    """Returns the table in which `save_reader` looks tokens up."""
    return np.random.default_rng(seed).standard_normal((len(WORDS), WIDTH)).astype(np.float32)


def save_tokenizer(path: Path, max_tokens: int = 16) -> None:
    """One token for each word of a letter, and marks as BERT has them."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    found = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    found.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    found.decoder = decoders.WordPiece()
    path.mkdir(parents=True, exist_ok=True)
    found.save(str(path / "tokenizer.json"))
    marks = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    (path / "tokenizer_config.json").write_text(json.dumps(marks | {"model_max_length": max_tokens}))


def save_reader(path: Path, labels: list[str] | None = None, **config: object) -> Path:
    """A directory as `optimum` writes it. A token's state is its row of `table`, twice that in the second of two texts.
    With labels, their logits are the first of the sum of a text's states."""
    kinds = ["input_ids", "attention_mask", "token_type_ids"]
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"], axis=0),
        helper.make_node("Add", ["token_type_ids", "one"], ["times"]),
        helper.make_node("Mul", ["times", "attention_mask"], ["kept"]),
        helper.make_node("Cast", ["kept"], ["factor"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["factor", "last"], ["factors"]),
        helper.make_node("Mul", ["rows", "factors"], ["last_hidden_state"]),
    ]
    name, shape = "last_hidden_state", ["batch", "sequence", WIDTH]
    if labels is not None:
        nodes.append(helper.make_node("ReduceSum", ["last_hidden_state", "middle"], ["sum"], keepdims=0))
        nodes.append(helper.make_node("Slice", ["sum", "from", "to", "middle"], ["logits"]))
        name, shape = "logits", ["batch", len(labels)]
    numbers = {"one": 1, "last": [-1], "middle": [1], "from": [0], "to": [len(labels or "")]}
    graph = helper.make_graph(
        nodes,
        "reader",
        [helper.make_tensor_value_info(kind, TensorProto.INT64, ["batch", "sequence"]) for kind in kinds],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)],
        [
            numpy_helper.from_array(table(), "table"),
            *(numpy_helper.from_array(np.array(value, np.int64), one) for one, value in numbers.items()),
        ],
    )
    save(graph, path / "model.onnx")
    save_tokenizer(path)
    named = {} if labels is None else {"id2label": dict(enumerate(labels))}
    (path / "config.json").write_text(json.dumps({"model_type": "bert", "pad_token_id": 0, **named, **config}))
    return path
