"""Text Generation Inference: its Messages API, and its own /generate for those that have nothing else."""

from __future__ import annotations

from penstock.dialects.dialect import Dialect, Document, Health, Lora, Member, Native, Overload, Series, Sign, Signal

METRICS = Document(
    b"/metrics",
    series={
        Signal.WAITING: Series(("tgi_queue_size",)),
        Signal.RUNNING: Series(("tgi_batch_current_size",)),
        # It has no gauge of its cache: what the batch may grow to stands for what it holds.
        Signal.KV_USED_TOKENS: Series(("tgi_batch_current_max_tokens",)),
        Signal.KV_TOKENS: Series(("tgi_batch_max_total_tokens",)),
        Signal.STEPS: Series(("tgi_batch_inference_count",)),
        Signal.PROMPT_TOKENS: Series(("tgi_request_input_length_sum",)),
        Signal.PROMPTS: Series(("tgi_request_input_length_count",)),
        Signal.DECODE_TOKENS: Series(("tgi_request_mean_time_per_token_duration_count",)),
        Signal.DECODE_SECONDS: Series(("tgi_request_mean_time_per_token_duration_sum",)),
    },
)

INFO = Document(
    b"/info",
    members={
        Signal.MAX_CONTEXT: Member(("max_total_tokens",)),
        Signal.MAX_RUNNING: Member(("max_concurrent_requests",)),
        Signal.STEP_TOKENS: Member(("max_batch_prefill_tokens",)),
    },
)

TGI = Dialect(
    name="tgi",
    signs=(
        Sign(b"tgi_", path="/metrics"),
        Sign(b'"max_concurrent_requests"', path="/info"),
    ),
    loads=(METRICS,),
    facts=(INFO,),
    max_sequences=128,
    health=Health(has_503_while_starting=True),
    overload=Overload(texts=(b'"overloaded"',)),
    renamed={"max_completion_tokens": "max_tokens"},
    dropped=("n", "user", "prompt_cache_key"),
    model="tgi",  # any other name is an adapter's
    lora=Lora("model"),
)

TGI_GENERATE = Dialect(
    name="tgi-generate",  # never guessed: TGI is better asked over its Messages API
    loads=TGI.loads,
    facts=TGI.facts,
    max_sequences=TGI.max_sequences,
    health=TGI.health,
    overload=TGI.overload,
    native=Native(
        whole="/generate",
        stream="/generate_stream",
        prompt="inputs",
        parameters=("parameters",),
        packed=None,
        renamed={
            "max_tokens": "max_new_tokens",
            "max_completion_tokens": "max_new_tokens",
            "temperature": "temperature",
            "top_p": "top_p",
            "seed": "seed",
            "stop": "stop",
            "frequency_penalty": "frequency_penalty",
        },
        constants={"details": True, "decoder_input_details": False},
        text=("generated_text",),
        delta=("token", "text"),
        hidden=("token", "special"),
        finish=("details", "finish_reason"),
        prompt_tokens=("details", "input_length"),
        output_tokens=("details", "generated_tokens"),
    ),
)
