"""AWQ's layout, as AutoAWQ writes it (version gemm).

`qweight` [in, out / 8] and `qzeros` [groups, out / 8] pack eight outputs into a word, the even ones before the odd;
`scales` are [groups, out].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.hub.quantization import (
    Json,
    Quantization,
    Tensors,
    pack_words,
    require,
    require_some,
    unpack_words,
    unsupported,
)
from penstock.hub.safetensors_file import TensorInfo, Written
from penstock.hub.stored import GroupedTensor, Part, StoredTensor, integers, packed

_PER_WORD = 8
_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # of each output in its word


@dataclass(frozen=True)
class Awq:
    @classmethod
    def read(cls, config: Json) -> Awq:
        require("quantization_config", config, bits=(4,), version=(None, "gemm", "GEMM"), zero_point=(None, True))
        return cls()

    @property
    def quantization(self) -> Quantization:
        return "int4"

    def weights(self, names: Set[str]) -> frozenset[str]:
        return frozenset(name.removesuffix("qweight") + "weight" for name in names if name.endswith(".qweight"))

    def check(self, infos: Mapping[str, TensorInfo]) -> None:
        weights = self.weights(infos.keys())
        require_some("awq", weights)
        for name in weights:
            base = name.removesuffix("weight")
            for part in ("qzeros", "scales"):
                if base + part not in infos:
                    raise unsupported(f"{base}qweight without {base}{part}")
            (inputs, words), (groups, *_) = infos[base + "qweight"].shape, infos[base + "scales"].shape
            if infos[base + "scales"].shape != (groups, words * _PER_WORD) or inputs % groups:
                raise unsupported(f"{base}scales of shape {list(infos[base + 'scales'].shape)}")
            if infos[base + "qzeros"].shape != (groups, words):
                raise unsupported(f"{base}qzeros of shape {list(infos[base + 'qzeros'].shape)}")

    def stored(self, name: str, tensors: Tensors) -> GroupedTensor:
        base = name.removesuffix("weight")
        scales = tensors.floats(base + "scales")
        values = packed(np.ascontiguousarray(_unpacked(tensors.integers(base + "qweight")).T))
        zeros = np.ascontiguousarray(_unpacked(tensors.integers(base + "qzeros")).T)
        return GroupedTensor(values, 4, StoredTensor(np.ascontiguousarray(scales.values.T), scales.format), zeros)

    def stored_part(self, name: str, tensors: Tensors, part: Part) -> GroupedTensor:
        base, (first, last) = name.removesuffix("weight"), part.column_range
        inputs, packed_words = tensors.infos[base + "qweight"].shape
        part.check((packed_words * _PER_WORD, inputs), name)
        own = part.groups(tensors.infos[base + "scales"].shape[0])
        if own is None or part.rows.start % _PER_WORD or part.rows.stop % _PER_WORD:
            return self.stored(name, tensors).part(part, name)
        words = slice(part.rows.start // _PER_WORD, part.rows.stop // _PER_WORD)
        found = tensors.cut(
            {
                base + "qweight": (slice(first, last), words),
                base + "qzeros": (own, words),
                base + "scales": (own, part.rows),
            }
        )
        return self.stored(name, found)


def _unpacked(words: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
    """[rows, outputs / 8] -> [rows, outputs]"""
    places = unpack_words(words, 4, axis=1).reshape(words.shape[0], -1, _PER_WORD)
    return places[:, :, _PLACES].reshape(words.shape[0], -1)


def awq_config(*, group: int, plain: Sequence[str] = ()) -> dict[str, Any]:
    """`plain` are the linears inside of layers that are not quantized."""
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(plain) or None,
    }


def awq_tensors(name: str, weight: GroupedTensor) -> dict[str, Written]:
    """Tensors that `name` (`….weight`) becomes in a file."""
    assert weight.bits == 4
    assert weight.order is None
    base = name.removesuffix("weight")
    zeros = np.full(weight.scales.values.shape, 8, np.uint8) if weight.zeros is None else weight.zeros
    return {
        f"{base}qweight": Written(_packed(integers(weight).T), "I32"),
        f"{base}qzeros": Written(_packed(zeros.T), "I32"),
        f"{base}scales": Written(weight.scales.values.T, weight.scales.format),
    }


def _packed(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    """[rows, outputs] -> [rows, outputs / 8]"""
    places = values.reshape(values.shape[0], -1, _PER_WORD)[:, :, np.argsort(_PLACES)]
    return pack_words(places.reshape(values.shape), 4, axis=1)
