"""MXFP4 in Hugging Face directories, as gpt-oss has its experts: `…_blocks` of 16 bytes, which hold 32 numbers of 4
bits, beside `…_scales`. All other tensors are floats.

Both lie in stacks of a layer's experts, of which `stacked_experts` reads a part. Knows names and shapes, not files.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from penstock.core.errors import ModelCorrupt
from penstock.hub.quantization import Quantization, Tensors, require_some
from penstock.hub.safetensors_file import TensorInfo
from penstock.hub.stored import MXFP4_GROUP, Part, Stored

BLOCKS, SCALES = "_blocks", "_scales"
_BLOCK_BYTES = MXFP4_GROUP // 2


def scales_of(blocks: str) -> str:
    """The name of the scales beside these blocks."""
    return blocks.removesuffix(BLOCKS) + SCALES


@dataclass(frozen=True)
class Mxfp4:
    @property
    def quantization(self) -> Quantization:
        return "mxfp4"

    def weights(self, names: Set[str]) -> frozenset[str]:
        return frozenset()  # `stacked_experts` names them

    def check(self, infos: Mapping[str, TensorInfo]) -> None:
        found = {name for name in infos if name.endswith(BLOCKS)}
        require_some("mxfp4", found)
        for name in found:
            blocks, scales = infos[name], infos.get(scales_of(name))
            if scales is None:
                raise ModelCorrupt(f"tensor '{name}' is there, and '{scales_of(name)}' is missing")
            is_whole = len(blocks.shape) == 4 and blocks.shape[3] == _BLOCK_BYTES and blocks.shape[:3] == scales.shape
            if not is_whole or {blocks.code, scales.code} != {"U8"}:
                raise ModelCorrupt(
                    f"tensor '{name}' is {blocks.code} {list(blocks.shape)}, and its scales {scales.code} "
                    f"{list(scales.shape)}: these are no experts in MXFP4"
                )

    def stored(self, name: str, tensors: Tensors) -> Stored:
        return tensors.floats(name)

    def stored_part(self, name: str, tensors: Tensors, part: Part) -> Stored:
        return self.stored(name, tensors).part(part, name)
