"""A model that was exported with its tokenizer: token ids become its inputs, and its output becomes vectors, scores or
probabilities of labels.

The files are those that `optimum` and sentence-transformers write: tokenizer.json and config.json beside model.onnx.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from penstock.api.openai.embeddings import Vectors
from penstock.core.errors import ModelCorrupt, ModelError, UnsupportedTask
from penstock.hub.encoder import Pooling, read_pooling
from penstock.hub.hf_directory import HFDirectory, read_json
from penstock.server.text_limits import TextLimits
from penstock.server.text_models import Relevance, Task
from penstock.tensors.datatypes import NUMPY, Array
from penstock.tensors.signature import Signature, TensorSpec
from penstock.text.tokenizer import Tokenizer

Activation = Literal["softmax", "sigmoid", "none"]

_IDS, _MASK, _TYPES = "input_ids", "attention_mask", "token_type_ids"
_VECTORS = ("sentence_embedding",)
_STATES = ("last_hidden_state", "token_embeddings")
_LOGITS = ("logits",)
_DEFAULT_TOKENS = 512  # of a text, where no file says how many
_MAX_TOKENS = 1 << 20  # what tokenizers say that mean no limit is larger
_LENGTHS = (8, 64, 32)  # lengths are multiples of the first up to the second, and of the third above it
_ACTIVATIONS: dict[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}


class TextReader:
    """Raises UnsupportedTask for a model that takes or makes something else; ModelError for files that are broken."""

    def __init__(self, directory: Path, signature: Signature) -> None:
        source = HFDirectory(directory).tokenizer_source
        config = read_json(directory / "config.json")
        self._inputs = _inputs(signature)
        self._output = _output(signature)
        self.length = _fixed_length(self._inputs[_IDS], signature)  # None: texts may have any
        self._pad = _number(config, "pad_token_id") or 0
        tokenizer = Tokenizer.load(source)
        most = _most_tokens(directory, config, source.config)
        vocab_size = _number(config, "vocab_size") or tokenizer.vocab_size
        self.limits = TextLimits(tokenizer, min(most, self.length or most), vocab_size)
        size = self._output.dims[-1] if self._output.dims else -1
        self.labels: tuple[str, ...] = ()
        self.dimensions = 0
        self._pooling: Pooling = "mean"
        self._activation: Activation = "none"
        if self._output.name in _LOGITS:
            self.labels = _labels(config, size)
            self._activation = _activation(config, len(self.labels))
        else:
            self.dimensions = size if size > 0 else _number(config, "hidden_size") or 0
            if self._output.name in _STATES:
                _refuse_dense(directory)
                self._pooling = read_pooling(directory) or "mean"

    @property
    def tasks(self) -> tuple[Task, ...]:
        if not self.labels:
            return ("embeddings", "relevance")
        return ("relevance", "classification") if len(self.labels) == 1 else ("classification",)

    @property
    def relevance(self) -> Relevance:
        return "pairs" if self.labels else "cosine"

    @property
    def output(self) -> str:
        return self._output.name

    def padded_length(self, num_tokens: int) -> int:
        """Texts of one padded length can be computed together."""
        if self.length is not None:
            return self.length
        step, most, long_step = _LENGTHS
        step = step if num_tokens <= most else long_step
        return min(-(-num_tokens // step) * step, max(self.limits.max_tokens, num_tokens))

    def inputs(self, texts: Sequence[list[int]], types: Sequence[list[int]] | None, length: int) -> dict[str, Array]:
        ids = np.full((len(texts), length), self._pad, np.int64)
        mask, kinds = np.zeros_like(ids), np.zeros_like(ids)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = text
            mask[row, : len(text)] = 1
            if types is not None:
                kinds[row, : len(text)] = types[row]
        made = {_IDS: ids, _MASK: mask, _TYPES: kinds}
        return {name: made[name].astype(NUMPY[spec.datatype], copy=False) for name, spec in self._inputs.items()}

    def values(self, output: Array, lengths: Sequence[int], *, is_raw: bool) -> Vectors:
        """`lengths`: of the texts, in tokens."""
        found = output.astype(np.float32, copy=False)
        if self.labels:
            return _activated(found.reshape(len(lengths), -1), "none" if is_raw else self._activation)
        if found.ndim == 3:
            found = _pooled(found, np.asarray(lengths), self._pooling)
        size = np.linalg.norm(found, axis=1, keepdims=True)
        vectors: Vectors = (found / np.maximum(size, 1e-12)).astype(np.float32, copy=False)
        return vectors


def _inputs(signature: Signature) -> dict[str, TensorSpec]:
    found = {spec.name: spec for spec in signature.inputs}
    if _IDS not in found or not found.keys() <= {_IDS, _MASK, _TYPES}:
        raise UnsupportedTask(
            f"its inputs are {', '.join(found)}: a model that reads texts takes {_IDS}, {_MASK} and {_TYPES}"
        )
    return found


def _output(signature: Signature) -> TensorSpec:
    found = {spec.name: spec for spec in signature.outputs}
    for name in (*_VECTORS, *_LOGITS, *_STATES):
        if name in found:
            return found[name]
    names = ", ".join((*_VECTORS, *_LOGITS, *_STATES))
    raise UnsupportedTask(f"its outputs are {', '.join(found)}: none of {names}")


def _fixed_length(spec: TensorSpec, signature: Signature) -> int | None:
    dims = spec.dims if signature.max_batch_size else spec.dims[1:]
    if len(dims) != 1 or (not signature.max_batch_size and spec.dims[0] not in (1, -1)):
        raise UnsupportedTask(f"its {_IDS} have the shape {spec.shape(signature.max_batch_size)}, and not [-1, -1]")
    return dims[0] if dims[0] > 0 else None


def _most_tokens(directory: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> int:
    positions = _number(config, "max_position_embeddings")
    if positions is not None and "roberta" in str(config.get("model_type")):
        positions -= (_number(config, "pad_token_id") or 0) + 1  # its positions begin after the padding token's
    trained = _number(read_json(directory / "sentence_bert_config.json"), "max_seq_length")
    said = [one for one in (positions, trained, _number(tokenizer, "model_max_length")) if one and one < _MAX_TOKENS]
    return max(1, min(said, default=_DEFAULT_TOKENS))


def _number(values: dict[str, Any], name: str) -> int | None:
    found = values.get(name)
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else None


def _labels(config: dict[str, Any], size: int) -> tuple[str, ...]:
    named = config.get("id2label")
    named = named if isinstance(named, dict) else {}
    count = size if size > 0 else len(named)
    if count < 1:
        raise UnsupportedTask("neither its file nor config.json says how many labels it has")
    return tuple(str(named.get(str(number), f"LABEL_{number}")) for number in range(count))


def _activation(config: dict[str, Any], num_labels: int) -> Activation:
    """The activation that sentence-transformers has written down, else that of transformers' pipelines."""
    told = config.get("sentence_transformers")
    told = told.get("activation_fn") if isinstance(told, dict) else config.get("sbert_ce_default_activation_function")
    if isinstance(told, str):
        name = told.rpartition(".")[2]
        if name not in _ACTIVATIONS:
            raise UnsupportedTask(
                f"config.json asks for the activation {name}: one of {', '.join(_ACTIVATIONS)} is known"
            )
        return _ACTIVATIONS[name]
    problem = config.get("problem_type")
    if problem == "regression":
        return "none"
    return "sigmoid" if num_labels == 1 or problem == "multi_label_classification" else "softmax"


def _refuse_dense(directory: Path) -> None:
    """Modules of sentence-transformers behind the pooling, which an export of the transformer alone does not have."""
    for one in directory.glob("*_Dense"):
        raise UnsupportedTask(
            f"{one.name} comes after the pooling, and the file has {' or '.join(_STATES)} alone: export it with "
            f"{_VECTORS[0]}"
        )


def _pooled(states: Array, lengths: Array, pooling: Pooling) -> Array:
    """[texts, tokens, dimensions] to [texts, dimensions]."""
    if pooling != "mean":
        token = lengths - 1 if pooling == "last" else 0 * lengths
        pooled: Array = states[np.arange(len(lengths)), token]
        return pooled
    mask = (np.arange(states.shape[1]) < lengths[:, None]).astype(np.float32)
    pooled = np.einsum("btd,bt->bd", states, mask) / lengths[:, None]
    return pooled


def _activated(logits: Array, activation: Activation) -> Array:
    if activation == "none":
        return logits
    if activation == "sigmoid":
        halved: Array = 0.5 * (1.0 + np.tanh(0.5 * logits))
        return halved
    exp = np.exp(logits - logits.max(axis=1, keepdims=True))
    found: Array = exp / exp.sum(axis=1, keepdims=True)
    return found


def read_texts(directories: Sequence[Path], signature: Signature) -> TextReader | str:
    """The reader of the first directory that has a tokenizer; or why the model takes no texts."""
    for directory in directories:
        if not (directory / "tokenizer.json").is_file():
            continue
        try:
            return TextReader(directory, signature)
        except UnsupportedTask as error:
            return error.message
        except ModelError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise ModelCorrupt(f"the files of {directory} are not understood: {error}") from None
    return "it has no tokenizer.json"
