"""One description for each kind of server, from its own source and documentation: no code."""

from __future__ import annotations

from penstock.dialects.dialect import Dialect
from penstock.dialects.engines.llamacpp import LLAMACPP
from penstock.dialects.engines.openai import OPENAI, PENSTOCK
from penstock.dialects.engines.sglang import SGLANG
from penstock.dialects.engines.tgi import TGI, TGI_GENERATE
from penstock.dialects.engines.triton import TRITON, TRITON_TRTLLM
from penstock.dialects.engines.trtllm import TRTLLM
from penstock.dialects.engines.vllm import VLLM

# In the order in which they are recognised: Triton may run vLLM inside and show its metrics too.
DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        PENSTOCK,
        TRITON_TRTLLM,
        TRITON,
        VLLM,
        SGLANG,
        TRTLLM,
        TGI,
        TGI_GENERATE,
        LLAMACPP,
        OPENAI,
    )
}
