"""TensorRT-LLM's own server, trtllm-serve: it needs return_perf_metrics, and enable_iter_perf_stats for its gauges."""

from __future__ import annotations

from penstock.dialects.dialect import Dialect, Document, Health, Lora, Member, Series, Sign, Signal, names_in

METRICS = Document(
    b"/prometheus/metrics",
    series={
        Signal.WAITING: Series(("trtllm_num_requests_waiting",)),
        Signal.RUNNING: Series(("trtllm_num_requests_running",)),
        Signal.KV_USAGE: Series(("trtllm_kv_cache_utilization",), join="max"),
        Signal.BLOCK_SIZE: Series(("trtllm_kv_cache_tokens_per_block",), join="max"),
        Signal.KV_BLOCKS: Series(("trtllm_kv_cache_max_blocks",)),
        Signal.PROMPT_TOKENS: Series(("trtllm_prompt_tokens_total",)),
        Signal.PROMPTS: Series(("trtllm_request_success_total",)),
        Signal.DECODE_TOKENS: Series(("trtllm_time_per_output_token_seconds_count",)),
        Signal.DECODE_SECONDS: Series(("trtllm_time_per_output_token_seconds_sum",)),
    },
)

TRTLLM = Dialect(
    name="trtllm",
    signs=(
        Sign(b"", header=b"x-trtllm-server-state"),
        Sign(b'"owned_by":"tensorrt_llm"', path="/v1/models"),
        Sign(b"trtllm_", path="/prometheus/metrics"),
    ),
    loads=(METRICS,),
    facts=(Document(b"/v1/models", members={Signal.MAX_CONTEXT: Member(("data", "*", "max_model_len"), "max")}),),
    health=Health(deep=b"/health_generate", starting_header=(b"x-trtllm-server-state", b"starting")),
    fields=names_in(
        "ignore_eos min_tokens stop_token_ids include_stop_str_in_output length_penalty top_p_min top_p_decay "
        "skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens add_generation_prompt "
        "add_special_tokens chat_template_kwargs documents "
        "guided_json guided_regex guided_choice guided_grammar structured_outputs"
    ),
    salt="cache_salt",
    lora=Lora("lora_request"),
    has_kv_events=True,
)
