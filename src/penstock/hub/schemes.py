"""The scheme that config.json's `quantization_config` names."""

from __future__ import annotations

from penstock.hub.awq import Awq
from penstock.hub.compressed_integers import FORMATS, CompressedIntegers
from penstock.hub.fp8 import Fp8, read_activations
from penstock.hub.fp8_blocks import Fp8Blocks
from penstock.hub.gptq import Gptq
from penstock.hub.mxfp4 import Mxfp4
from penstock.hub.quantization import Json, Scheme


def read_scheme(config: Json) -> Scheme:
    """Scheme of config.json's `quantization_config`; anything not understood is refused."""
    method = config.get("quant_method")
    if method == "gptq":
        return Gptq.read(config)
    if method == "awq":
        return Awq.read(config)
    if method == "mxfp4":
        return Mxfp4()
    if method == "compressed-tensors" and config.get("format") in FORMATS:
        return CompressedIntegers.read(config)
    if method == "fp8" and config.get("weight_block_size") is not None:
        return Fp8Blocks.read(config)
    return Fp8(read_activations(config))
