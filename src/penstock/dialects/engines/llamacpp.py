"""llama.cpp's server. It counts prompts and tokens when a request is over; its decode calls it counts as they come."""

from __future__ import annotations

from penstock.dialects.dialect import Dialect, Document, Health, Lora, Member, Series, Sign, Signal, names_in

METRICS = Document(
    b"/metrics",  # with --metrics
    series={
        Signal.WAITING: Series(("llamacpp:requests_deferred",)),
        Signal.RUNNING: Series(("llamacpp:requests_processing",)),
        Signal.KV_USAGE: Series(("llamacpp:kv_cache_usage_ratio",)),  # of older ones
        Signal.KV_USED_TOKENS: Series(("llamacpp:kv_cache_tokens",)),
        Signal.STEPS: Series(("llamacpp:n_decode_total",)),
        Signal.PREFILL_TOKENS: Series(("llamacpp:prompt_tokens_total",)),
        Signal.PREFILL_SECONDS: Series(("llamacpp:prompt_seconds_total",)),
        Signal.DECODE_TOKENS: Series(("llamacpp:tokens_predicted_total",)),
        Signal.DECODE_SECONDS: Series(("llamacpp:tokens_predicted_seconds_total",)),
    },
)

# Who waits for a slot is not in it, and need not be: then all are taken.
SLOTS = Document(b"/slots", members={Signal.RUNNING: Member(("*", "is_processing"))})

LLAMACPP = Dialect(
    name="llamacpp",
    signs=(
        Sign(b"llama.cpp", header=b"server"),
        Sign(b'"owned_by":"llamacpp"', path="/v1/models"),
        Sign(b'"default_generation_settings"', path="/props"),
    ),
    loads=(METRICS, SLOTS),
    facts=(
        Document(
            b"/props",
            members={
                Signal.MAX_CONTEXT: Member(("default_generation_settings", "n_ctx")),
                Signal.MAX_RUNNING: Member(("total_slots",)),
            },
        ),
    ),
    fields=names_in(
        "ignore_eos typical_p typ_p top_n_sigma repeat_penalty repeat_last_n dynatemp_range dynatemp_exponent mirostat "
        "mirostat_tau mirostat_eta dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers "
        "xtc_probability xtc_threshold samplers min_keep n_probs post_sampling_probs cache_prompt timings_per_token "
        "return_tokens grammar json_schema chat_template_kwargs reasoning_format add_generation_prompt "
        "parse_tool_calls"
    ),
    max_sequences=4,
    health=Health(starting_text=b"Loading model", has_503_while_starting=True),
    lora=Lora(None, load=b"/lora-adapters"),  # a scale for each that it was started with
)
