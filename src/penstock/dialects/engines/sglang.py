"""SGLang. Its exposition needs --enable-metrics; /v1/loads is always there in newer ones, and says more."""

from __future__ import annotations

from penstock.dialects.dialect import (
    Cancel,
    Dialect,
    Document,
    Health,
    Lora,
    Member,
    Parking,
    PriorityField,
    Series,
    Sign,
    Signal,
    names_in,
)

LOADS = Document(
    b"/v1/loads",
    members={
        Signal.WAITING: Member(("loads", "*", "num_waiting_reqs")),
        Signal.RUNNING: Member(("loads", "*", "num_running_reqs")),
        Signal.WAITING_TOKENS: Member(("loads", "*", "num_waiting_uncached_tokens")),
        Signal.KV_USAGE: Member(("loads", "*", "token_usage"), "max"),
        Signal.KV_USED_TOKENS: Member(("loads", "*", "num_used_tokens")),
        Signal.KV_TOKENS: Member(("loads", "*", "max_total_num_tokens")),
        Signal.MAX_RUNNING: Member(("loads", "*", "max_running_requests")),
        Signal.DECODE_RATE: Member(("loads", "*", "gen_throughput")),
    },
)

METRICS = Document(
    b"/metrics",
    series={
        Signal.WAITING: Series(("sglang:num_queue_reqs",), also=("sglang:num_grammar_queue_reqs",)),
        Signal.RUNNING: Series(("sglang:num_running_reqs",)),
        Signal.KV_USAGE: Series(
            ("sglang:token_usage",),
            join="max",
            also=("sglang:full_token_usage", "sglang:swa_token_usage", "sglang:mamba_usage"),
        ),
        Signal.KV_USED_TOKENS: Series(("sglang:num_used_tokens",)),
        Signal.KV_TOKENS: Series(("sglang:max_total_num_tokens",)),
        Signal.BLOCK_SIZE: Series(("sglang:page_size",), join="max"),
        Signal.KV_BLOCKS: Series(("sglang:num_pages",)),
        Signal.MAX_RUNNING: Series(("sglang:max_running_requests",)),
        Signal.DECODE_RATE: Series(("sglang:gen_throughput",)),
        Signal.PROMPT_TOKENS: Series(("sglang:prompt_tokens_total",)),
        Signal.PROMPTS: Series(("sglang:num_requests_total",)),
        Signal.DECODE_TOKENS: Series(
            ("sglang:inter_token_latency_seconds_count", "sglang:time_per_output_token_seconds_count")
        ),
        Signal.DECODE_SECONDS: Series(
            ("sglang:inter_token_latency_seconds_sum", "sglang:time_per_output_token_seconds_sum")
        ),
    },
)

_INFO = {
    Signal.BLOCK_SIZE: Member(("page_size",)),
    Signal.STEP_TOKENS: Member(("chunked_prefill_size",)),
    Signal.MAX_RUNNING: Member(("max_running_requests",)),
    Signal.KV_TOKENS: Member(("max_total_num_tokens",)),
}

SGLANG = Dialect(
    name="sglang",
    signs=(
        Sign(b'"owned_by":"sglang"', path="/v1/models"),
        Sign(b"sglang:", path="/metrics"),
        Sign(b'"mem_fraction_static"', path="/server_info"),
    ),
    loads=(LOADS, METRICS),
    facts=(
        Document(b"/v1/models", members={Signal.MAX_CONTEXT: Member(("data", "*", "max_model_len"), "max")}),
        Document(b"/get_server_info", members=_INFO),  # the old name
        Document(b"/server_info", members=_INFO),
    ),
    health=Health(deep=b"/health_generate", has_503_while_starting=True),
    fields=names_in(
        "ignore_eos min_tokens stop_token_ids no_stop_trim skip_special_tokens continue_final_message "
        "chat_template_kwargs separate_reasoning stream_reasoning json_schema regex ebnf"
    ),
    salt="cache_salt",
    request_id="rid",
    priority=PriorityField("priority", high=1, refusal=b"priority"),
    lora=Lora("lora_path", b"/load_lora_adapter", b"/unload_lora_adapter"),
    cancel=Cancel(b"/abort_request", "rid"),
    # Its scheduler dies of a release while it is busy, and weights without a backup are gone.
    parking=Parking(
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "--enable-memory-saver and --enable-weights-cpu-backup",
    ),
    has_kv_events=True,
    handover="room",
)
