"""Every metric penstock exports: name, kind, unit, labels, one sentence. The docs page is generated from this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Fine where people notice (a few ms to a second), coarse beyond.
LATENCY_BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1, 1.5, 2, 3, 5, 10, 20, 30, 60, 120,
)  # fmt: skip
TOKEN_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


REQUESTS = Metric(
    "penstock_requests_total", "counter", "Requests answered, by HTTP route, status and how they ended.",
    ("route", "status", "outcome"),
)  # fmt: skip
REQUESTS_OPEN = Metric("penstock_requests_open", "gauge", "Requests being answered right now.")
TTFT = Metric(
    "penstock_ttft_seconds", "histogram", "Time from a request's arrival to its first token.", ("model",),
    LATENCY_BUCKETS_S,
)  # fmt: skip
TTFT_PART = Metric(
    "penstock_ttft_part_seconds", "histogram",
    "The parts of the time to first token: tokenize, queue, prefill, first_token (from the engine to the client).",
    ("model", "part"), LATENCY_BUCKETS_S,
)  # fmt: skip
TPOT = Metric(
    "penstock_tpot_seconds", "histogram", "Time per output token after the first, averaged over each request.",
    ("model",), LATENCY_BUCKETS_S,
)  # fmt: skip
REQUEST_LATENCY = Metric(
    "penstock_request_seconds", "histogram", "Time from a request's arrival to its last token.", ("model",),
    LATENCY_BUCKETS_S,
)  # fmt: skip
SLO_REQUESTS = Metric(
    "penstock_slo_requests_total", "counter", "Requests that met, or missed, a latency objective (ttft, tpot).",
    ("model", "objective", "met"),
)  # fmt: skip
PROMPT_TOKENS = Metric("penstock_prompt_tokens", "histogram", "Prompt tokens per request.", ("model",), TOKEN_BUCKETS)
OUTPUT_TOKENS = Metric(
    "penstock_output_tokens", "histogram", "Generated tokens per request.", ("model",), TOKEN_BUCKETS
)

ENGINE_READY = Metric("penstock_engine_ready", "gauge", "1 while the engine accepts requests.")
ENGINE_RESTARTS = Metric("penstock_engine_restarts_total", "counter", "Times the engine process was started again.")
SEQUENCES_RUNNING = Metric("penstock_sequences_running", "gauge", "Sequences in the batch.")
SEQUENCES_WAITING = Metric(
    "penstock_sequences_waiting", "gauge", "Sequences that wait for a place in the batch: queue depth."
)
KV_USAGE = Metric("penstock_kv_usage_ratio", "gauge", "Share of the KV cache's blocks that sequences hold, 0 to 1.")
KV_CACHED_BLOCKS = Metric("penstock_kv_cached_blocks", "gauge", "Blocks that a prefix lookup can find.")
KV_EVICTIONS = Metric("penstock_kv_evictions_total", "counter", "Cached blocks given up to make room.")
STEPS = Metric("penstock_steps_total", "counter", "Engine steps run.")
STEP_TIME = Metric("penstock_step_seconds", "histogram", "Time of one engine step.", (), LATENCY_BUCKETS_S)
BATCH_SIZE = Metric("penstock_batch_sequences", "histogram", "Sequences per engine step.", (), BATCH_BUCKETS)
STEP_TOKENS = Metric("penstock_step_tokens", "histogram", "Tokens computed per engine step.", (), TOKEN_BUCKETS)
STEP_BUDGET = Metric("penstock_step_budget_tokens", "gauge", "Tokens a step may carry now, under the latency target.")
PREEMPTIONS = Metric("penstock_preemptions_total", "counter", "Sequences that gave up their blocks to others.")
PREFIX_TOKENS = Metric("penstock_prefix_query_tokens_total", "counter", "Prompt tokens looked up in the prefix cache.")
PREFIX_HIT_TOKENS = Metric("penstock_prefix_hit_tokens_total", "counter", "Prompt tokens found in the prefix cache.")
GENERATED_TOKENS = Metric("penstock_generated_tokens_total", "counter", "Tokens the engine generated.")

CATALOG: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
