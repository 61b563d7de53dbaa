"""GPTQ's layout, as AutoGPTQ and GPTQModel write it.

`qweight` [in / 8, out] packs eight inputs into a word, `qzeros` [groups, out / 8] eight outputs; `scales` are
[groups, out], and `g_idx` tells the group of each input. Format 1 stores zero points less one, format 2 as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from penstock.hub.quantization import (
    Json,
    Quantization,
    Tensors,
    group_index,
    order_of,
    pack_words,
    require,
    require_some,
    unpack_words,
    unsupported,
)
from penstock.hub.safetensors_file import TensorInfo, Written
from penstock.hub.stored import GroupedTensor, Part, StoredTensor, integers, packed


@dataclass(frozen=True)
class Gptq:
    bits: Literal[4, 8]
    added: int  # to a zero point, which format 1 stores less one

    @classmethod
    def read(cls, config: Json) -> Gptq:
        require("quantization_config", config, bits=(4, 8), checkpoint_format=(None, "gptq", "gptq_v2"))
        require("quantization_config", config, is_marlin_format=(None, False), lm_head=(None, False))
        return cls(config["bits"], 0 if config.get("checkpoint_format") == "gptq_v2" else 1)

    @property
    def quantization(self) -> Quantization:
        return "int4" if self.bits == 4 else "int8"

    def weights(self, names: Set[str]) -> frozenset[str]:
        return frozenset(name.removesuffix("qweight") + "weight" for name in names if name.endswith(".qweight"))

    def check(self, infos: Mapping[str, TensorInfo]) -> None:
        weights = self.weights(infos.keys())
        require_some("gptq", weights)
        for name in weights:
            base = name.removesuffix("weight")
            for part in ("qzeros", "scales"):
                if base + part not in infos:
                    raise unsupported(f"{base}qweight without {base}{part}")
            per_word = 32 // self.bits
            (words, outputs), (groups, *_) = infos[base + "qweight"].shape, infos[base + "scales"].shape
            if infos[base + "scales"].shape != (groups, outputs) or words * per_word % groups:
                raise unsupported(f"{base}scales of shape {list(infos[base + 'scales'].shape)}")
            if infos[base + "qzeros"].shape != (groups, outputs // per_word):
                raise unsupported(f"{base}qzeros of shape {list(infos[base + 'qzeros'].shape)}")

    def stored(self, name: str, tensors: Tensors) -> GroupedTensor:
        base = name.removesuffix("weight")
        words = tensors.integers(base + "qweight")
        scales = tensors.floats(base + "scales")
        zeros = unpack_words(tensors.integers(base + "qzeros"), self.bits, axis=1) + np.uint8(self.added)
        # A word has consecutive inputs of one output, in order: its bytes are what is wanted, once outputs come first.
        values = np.ascontiguousarray(words.T).view(np.uint8)
        columns = words.shape[0] * 32 // self.bits
        order = self._order(base, columns // scales.values.shape[0], tensors)
        if order is not None:
            integers = unpack_words(words, self.bits, axis=0)[order].T
            values = packed(integers) if self.bits == 4 else np.ascontiguousarray(integers)
        transposed = StoredTensor(np.ascontiguousarray(scales.values.T), scales.format)
        middle = 1 << (self.bits - 1)
        symmetric = bool(np.all(zeros == middle))
        return GroupedTensor(
            values, self.bits, transposed, None if symmetric else np.ascontiguousarray(zeros.T), order=order
        )

    def _order(self, base: str, group: int, tensors: Tensors) -> npt.NDArray[np.int64] | None:
        name = base + "g_idx"
        return order_of(tensors.integers(name), group, name) if name in tensors.names else None

    def stored_part(self, name: str, tensors: Tensors, part: Part) -> GroupedTensor:
        base, per_word = name.removesuffix("weight"), 32 // self.bits
        words, outputs = tensors.infos[base + "qweight"].shape
        part.check((outputs, words * per_word), name)
        first, last = part.column_range
        num_groups = tensors.infos[base + "scales"].shape[0]
        own = part.groups(num_groups)
        is_cut = any(edge % per_word for edge in (first, last, part.rows.start, part.rows.stop))
        if own is None or is_cut or self._order(base, part.shape[1] // num_groups, tensors) is not None:
            return self.stored(name, tensors).part(part, name)
        found = tensors.cut(
            {
                base + "qweight": (slice(first // per_word, last // per_word), part.rows),
                base + "qzeros": (own, slice(part.rows.start // per_word, part.rows.stop // per_word)),
                base + "scales": (own, part.rows),
            }
        )
        return self.stored(name, found)


def gptq_config(
    *, bits: int, group: int, symmetric: bool, act_order: bool, plain: Sequence[str] = ()
) -> dict[str, Any]:
    """`plain` are the linears inside of layers that are not quantized."""
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": act_order,
        "lm_head": False,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
    }
    return config | {"dynamic": {f"-:^{re.escape(name)}$": {} for name in plain}} if plain else config


def gptq_tensors(name: str, weight: GroupedTensor) -> dict[str, Written]:
    """Tensors that `name` (`….weight`) becomes in a file, in format 1: no zero point may be 0."""
    base, bits = name.removesuffix("weight"), weight.bits
    values = integers(weight)
    columns, (rows, groups) = values.shape[1], weight.scales.values.shape
    if weight.order is not None:
        values = values[:, np.argsort(weight.order)]
    zeros = np.full((rows, groups), 1 << (bits - 1), np.uint8) if weight.zeros is None else weight.zeros
    assert zeros.min() > 0, "format 1 cannot say a zero point of 0"
    return {
        f"{base}qweight": Written(pack_words(values.T, bits, axis=0), "I32"),
        f"{base}qzeros": Written(pack_words((zeros - 1).T, bits, axis=1), "I32"),
        f"{base}scales": Written(weight.scales.values.T, weight.scales.format),
        f"{base}g_idx": Written(group_index(weight.order, columns, columns // groups), "I32"),
    }
