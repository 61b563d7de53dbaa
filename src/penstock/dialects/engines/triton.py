"""Triton: its generate extension in front of a text model (vLLM's backend), and TensorRT-LLM's ensemble.

Metrics are on a port of their own. Its OpenAI frontend is another server, and plain OpenAI.
"""

from __future__ import annotations

from penstock.dialects.dialect import Dialect, Document, Health, Native, Overload, Series, Sign, Signal

_METRICS_PORT = 8002
_HEALTH = Health(b"/v2/health/ready", has_503_while_starting=True)
_OVERLOAD = Overload(texts=(b"maximum queue size", b"Exceeds maximum"))
_IS_TRITON = Sign(b'"name":"triton"', path="/v2")

_SAMPLING = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
_COUNTS: dict[str, object] = {
    "exclude_input_in_output": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
}

TRITON = Dialect(
    name="triton",
    signs=(_IS_TRITON,),
    # What waits is known, what runs is not: requests are counted where they are sent.
    loads=(
        Document(
            b"/metrics",
            series={Signal.WAITING: Series(("nv_inference_pending_request_count",))},
            port=_METRICS_PORT,
        ),
    ),
    health=_HEALTH,
    overload=_OVERLOAD,
    has_stream_usage=False,
    native=Native(
        whole="/v2/models/{model}/generate",
        stream="/v2/models/{model}/generate_stream",
        prompt="text_input",
        parameters=(),
        packed="sampling_parameters",  # Triton itself takes no fractions and no lists
        renamed=_SAMPLING | {"stop": "stop"},
        constants=_COUNTS | {"return_finish_reason": True},
        text=("text_output",),
        delta=("text_output",),
        finish=("finish_reason",),
        prompt_tokens=("num_input_tokens",),
        output_tokens=("num_output_tokens",),
        stream_member="stream",
    ),
)

TRITON_TRTLLM = Dialect(
    name="triton-trtllm",
    signs=(Sign(b"nv_trt_llm_", path="/metrics"), Sign(b"tensorrt_llm", path="/v2/models/{model}/config")),
    loads=(
        Document(
            b"/metrics",
            series={
                Signal.WAITING: Series(("nv_trt_llm_request_metrics",), labels={"request_type": "waiting"}),
                Signal.RUNNING: Series(("nv_trt_llm_request_metrics",), labels={"request_type": "scheduled"}),
                Signal.MAX_RUNNING: Series(("nv_trt_llm_request_metrics",), labels={"request_type": "max"}),
                Signal.KV_USAGE: Series(
                    ("nv_trt_llm_kv_cache_block_metrics",), labels={"kv_cache_block_type": "fraction"}, join="max"
                ),
                Signal.BLOCK_SIZE: Series(
                    ("nv_trt_llm_kv_cache_block_metrics",), labels={"kv_cache_block_type": "tokens_per"}, join="max"
                ),
                Signal.KV_BLOCKS: Series(("nv_trt_llm_kv_cache_block_metrics",), labels={"kv_cache_block_type": "max"}),
            },
            port=_METRICS_PORT,
        ),
    ),
    health=_HEALTH,
    overload=_OVERLOAD,
    has_stream_usage=False,
    native=Native(
        whole="/v2/models/{model}/generate",
        stream="/v2/models/{model}/generate_stream",
        prompt="text_input",
        parameters=(),
        packed=None,  # they are tensors of the ensemble
        renamed=_SAMPLING | {"stop": "stop_words"},
        constants=_COUNTS | {"bad_words": "", "stop_words": ""},
        text=("text_output",),
        delta=("text_output",),
        prompt_tokens=("num_input_tokens",),
        output_tokens=("num_output_tokens",),
        stream_member="stream",
        stops_joined=True,
    ),
)
