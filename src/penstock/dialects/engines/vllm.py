"""vLLM 0.6 to 0.32. Its label `engine` is a data-parallel rank."""

from __future__ import annotations

from penstock.dialects.dialect import (
    Cancel,
    Dialect,
    Document,
    Lora,
    Member,
    Parking,
    PriorityField,
    Series,
    Sign,
    Signal,
    names_in,
)

METRICS = Document(
    b"/metrics",
    series={
        Signal.WAITING: Series(("vllm:num_requests_waiting", "vllm:num_requests_waiting_by_reason")),
        Signal.RUNNING: Series(("vllm:num_requests_running",)),
        Signal.KV_USAGE: Series(("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"), join="max"),
        Signal.BLOCK_SIZE: Series(("vllm:cache_config_info",), label="block_size", join="max"),
        Signal.KV_BLOCKS: Series(("vllm:cache_config_info",), label="num_gpu_blocks"),
        Signal.KV_TOKENS: Series(("vllm:cache_config_info",), label="kv_cache_size_tokens"),
        Signal.IS_AWAKE: Series(("vllm:engine_sleep_state",), labels={"sleep_state": "awake"}, join="max"),
        Signal.STEPS: Series(("vllm:iteration_tokens_total_count", "vllm:generation_tokens_total")),
        Signal.PROMPT_TOKENS: Series(("vllm:request_prompt_tokens_sum",)),
        Signal.PROMPTS: Series(("vllm:request_prompt_tokens_count",)),
        Signal.PREFILL_TOKENS: Series(("vllm:request_prefill_kv_computed_tokens_sum", "vllm:prompt_tokens_total")),
        Signal.PREFILL_SECONDS: Series(("vllm:request_prefill_time_seconds_sum",)),
        Signal.DECODE_TOKENS: Series(("vllm:request_generation_tokens_sum",)),
        Signal.DECODE_SECONDS: Series(("vllm:request_decode_time_seconds_sum",)),
    },
)

VLLM = Dialect(
    name="vllm",
    signs=(
        Sign(b'"owned_by":"vllm"', path="/v1/models"),
        Sign(b"vllm:num_requests_running", path="/metrics"),
    ),
    loads=(METRICS,),
    facts=(Document(b"/v1/models", members={Signal.MAX_CONTEXT: Member(("data", "*", "max_model_len"), "max")}),),
    fields=names_in(
        "ignore_eos min_tokens stop_token_ids bad_words allowed_token_ids include_stop_str_in_output length_penalty "
        "skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens add_generation_prompt "
        "continue_final_message add_special_tokens chat_template_kwargs documents return_tokens_as_token_ids "
        "return_token_ids thinking_token_budget "
        "guided_json guided_regex guided_choice guided_grammar structured_outputs"
    ),
    salt="cache_salt",
    priority=PriorityField("priority", high=-1, refusal=b"priority scheduling"),
    lora=Lora("model", b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter"),
    cancel=Cancel(b"/abort_requests", "request_ids", is_list=True),
    # Level 1 keeps the weights in host memory; without a mode newer ones abort what runs.
    parking=Parking(
        "/sleep?level=1&mode=wait", "/wake_up", "--enable-sleep-mode and VLLM_SERVER_DEV_MODE=1", "/is_sleeping"
    ),
    has_kv_events=True,
    handover="params",
)
