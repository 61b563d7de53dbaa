"""Text Generation Inference: its Messages API, and its own /generate for those that have nothing else."""

from __future__ import annotations

from penstock.dialects.dialect import Dialect, Document, Health, Lora, Member, Native, Overload, Series, Sign, Signal
from penstock.dialects.fields import CHAT, COMPLETIONS

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

# What its OpenAPI document does not have: its parser skips what it does not know.
_NOT_SAMPLED: dict[str, tuple[object, ...]] = {"n": (1,), "top_k": (-1, 0), "min_p": (0,)}
_NOT_IN_CHATS = _NOT_SAMPLED | {
    "repetition_penalty": (1,),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_NOT_IN_COMPLETIONS = _NOT_SAMPLED | {
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
}

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
    dropped=("n", "user", "prompt_cache_key", "metadata", "safety_identifier", "prediction"),
    lists_stops=True,
    lacks={CHAT: _NOT_IN_CHATS, COMPLETIONS: _NOT_IN_COMPLETIONS},
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
        prompt_tokens=("details", "input_length"),  # of a stream
        prompt_tokens_header=b"x-prompt-tokens",
        output_tokens=("details", "generated_tokens"),
    ),
)
