"""Every metric penstock exports: name, kind, unit, labels, one sentence. The docs page is generated from this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Milliseconds up to ten, then steps that grow with what is measured, so that a quantile is never far off.
LATENCY_BUCKETS_S = (
    0.0005,
    0.001,
    0.002,
    0.003,
    0.004,
    0.005,
    0.006,
    0.007,
    0.008,
    0.009,
    0.01,
    0.012,
    0.014,
    0.016,
    0.018,
    0.02,
    0.025,
    0.03,
    0.035,
    0.04,
    0.045,
    0.05,
    0.06,
    0.07,
    0.08,
    0.09,
    0.1,
    0.125,
    0.15,
    0.175,
    0.2,
    0.25,
    0.3,
    0.35,
    0.4,
    0.45,
    0.5,
    0.6,
    0.7,
    0.8,
    0.9,
    1,
    1.25,
    1.5,
    1.75,
    2,
    2.5,
    3,
    4,
    5,
    6,
    8,
    10,
    15,
    20,
    30,
    45,
    60,
    90,
    120,
)
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
    "penstock_requests_total",
    "counter",
    "Requests answered, by HTTP route, status and how they ended.",
    ("route", "status", "outcome"),
)
REQUESTS_OPEN = Metric("penstock_requests_open", "gauge", "Requests being answered right now.")
TTFT = Metric(
    "penstock_ttft_seconds",
    "histogram",
    "Time from a request's arrival to its first token.",
    ("model",),
    LATENCY_BUCKETS_S,
)
TTFT_PART = Metric(
    "penstock_ttft_part_seconds",
    "histogram",
    "The parts of the time to first token: tokenize, pull (of KV blocks, if another engine was asked), queue, prefill, "
    "first_token (from the engine to the client).",
    ("model", "part"),
    LATENCY_BUCKETS_S,
)
TPOT = Metric(
    "penstock_tpot_seconds",
    "histogram",
    "Time per output token after the first, averaged over each request.",
    ("model",),
    LATENCY_BUCKETS_S,
)
REQUEST_LATENCY = Metric(
    "penstock_request_seconds",
    "histogram",
    "Time from a request's arrival to its last token.",
    ("model",),
    LATENCY_BUCKETS_S,
)
SLO_REQUESTS = Metric(
    "penstock_slo_requests_total",
    "counter",
    "Requests that met, or missed, an objective for a time: ttft, tpot, latency.",
    ("model", "objective", "met"),
)
PROMPT_TOKENS = Metric("penstock_prompt_tokens", "histogram", "Prompt tokens per request.", ("model",), TOKEN_BUCKETS)
OUTPUT_TOKENS = Metric(
    "penstock_output_tokens", "histogram", "Generated tokens per request.", ("model",), TOKEN_BUCKETS
)
IMAGES = Metric("penstock_images_total", "counter", "Images that prompts showed, once for each part.", ("model",))
IMAGE_TOKENS = Metric("penstock_image_tokens_total", "counter", "Their tokens, cached ones among them.", ("model",))

EMBEDDED_TEXTS = Metric(
    "penstock_embedded_texts_total", "counter", "Texts that vectors or scores were made of.", ("model",)
)
EMBEDDED_TOKENS = Metric("penstock_embedded_tokens_total", "counter", "Their tokens.", ("model",))
DEVICE_SECONDS = Metric(
    "penstock_device_seconds_total",
    "counter",
    "Device time that requests took, each step's split by marginal share; all together they are "
    "penstock_busy_seconds_total. The tenant is the gateway's: the first 200 by name, all others as `other`, empty "
    "where it is not told.",
    ("model", "tenant"),
)
KV_BLOCK_SECONDS = Metric(
    "penstock_kv_block_seconds_total",
    "counter",
    "Blocks of the KV cache that requests held in steps, times the steps' seconds.",
    ("model", "tenant"),
)

GUIDED_REQUESTS = Metric(
    "penstock_guided_requests_total",
    "counter",
    "Requests with a guide: known (the same was found good before), new, or refused.",
    ("kind", "verdict"),
)
GUIDE_TRIAL_TIME = Metric(
    "penstock_guide_trial_seconds",
    "histogram",
    "Time to find a new guide good or bad, before generation.",
    (),
    LATENCY_BUCKETS_S,
)

TRACES_LOST = Metric(
    "penstock_traces_lost_total", "counter", "Requests whose spans were to be pushed and could not be, or not in time."
)
ENGINE_READY = Metric("penstock_engine_ready", "gauge", "1 while the engine accepts requests.")
ENGINE_RESTARTS = Metric("penstock_engine_restarts_total", "counter", "Times the engine process was started again.")
STARTUP = Metric(
    "penstock_startup_seconds",
    "gauge",
    "Time of each phase of the last start, from the start of the replica's process until it was ready; of the engine "
    "alone, once that was started again.",
    ("phase",),
)
STARTUP_CPU = Metric(
    "penstock_startup_cpu_seconds", "gauge", "Processor time of each phase of the last start.", ("phase",)
)
REPLICA_INFO = Metric(
    "penstock_replica_info",
    "gauge",
    "1, with what the replica is: to join others by model, device or version.",
    ("model", "device", "device_name", "number_format", "quant", "version"),
)
SEQUENCES_RUNNING = Metric("penstock_sequences_running", "gauge", "Sequences in the batch.")
SEQUENCES_WAITING = Metric(
    "penstock_sequences_waiting", "gauge", "Sequences that wait for a place in the batch: queue depth."
)
QUEUED_TOKENS = Metric(
    "penstock_queued_tokens", "gauge", "Tokens that are to be computed before their sequences can generate."
)
KV_USAGE = Metric("penstock_kv_usage_ratio", "gauge", "Share of the KV cache's blocks that sequences hold, 0 to 1.")
KV_FRAGMENTATION = Metric(
    "penstock_kv_fragmentation_ratio", "gauge", "Share of the room in sequences' blocks that has no token in it."
)
KV_CAPACITY = Metric(
    "penstock_kv_capacity_tokens", "gauge", "Tokens that the KV cache has room for, in its number format.", ("format",)
)
KV_CACHED_BLOCKS = Metric("penstock_kv_cached_blocks", "gauge", "Blocks that a prefix lookup can find.")
KV_EVICTIONS = Metric("penstock_kv_evictions_total", "counter", "Cached blocks given up to make room.")
LORA_ADAPTERS = Metric(
    "penstock_lora_adapters", "gauge", "LoRA adapters by where they are: loaded (all), host, device.", ("place",)
)
LORA_SWAPS = Metric("penstock_lora_swaps_total", "counter", "Times an adapter was put onto the device.")
LORA_READS = Metric("penstock_lora_reads_total", "counter", "Times an adapter was read from disk.")
BUSY = Metric("penstock_busy_seconds_total", "counter", "Time in which the device worked on steps: its utilisation.")
STEP_TIME = Metric(
    "penstock_step_seconds",
    "histogram",
    "Time of one engine step, without its wait for the step before.",
    (),
    LATENCY_BUCKETS_S,
)
BATCH_SIZE = Metric("penstock_batch_sequences", "histogram", "Sequences per engine step.", (), BATCH_BUCKETS)
STEP_TOKENS = Metric("penstock_step_tokens", "histogram", "Tokens computed per engine step.", (), TOKEN_BUCKETS)
STEP_BUDGET = Metric("penstock_step_budget_tokens", "gauge", "Tokens a step may carry now, under the latency target.")
PREEMPTIONS = Metric("penstock_preemptions_total", "counter", "Sequences that gave up their blocks to others.")
RECOMPUTED_TOKENS = Metric(
    "penstock_recomputed_tokens_total", "counter", "Tokens computed a second time because of that."
)
LOADED_TOKENS = Metric(
    "penstock_host_kv_tokens_total", "counter", "Tokens whose keys and values came back from host memory."
)
DISK_KV_BLOCKS = Metric("penstock_disk_kv_blocks", "gauge", "KV blocks on disk.")
DISK_KV_BYTES = Metric("penstock_disk_kv_bytes", "gauge", "Bytes of their files.")
DISK_KV_TOKENS = Metric(
    "penstock_disk_kv_tokens_total", "counter", "Tokens whose keys and values were read from disk into host memory."
)
DISK_KV_DROPPED = Metric(
    "penstock_disk_kv_dropped_blocks_total",
    "counter",
    "KV blocks that left host memory before they were written to disk, or that could not be written.",
)
DISK_KV_LATE = Metric(
    "penstock_disk_kv_late_blocks_total",
    "counter",
    "KV blocks whose read took longer than computing them: their sequence did not wait for them.",
)
DISK_KV_DAMAGED = Metric(
    "penstock_disk_kv_damaged_blocks_total",
    "counter",
    "Files of KV blocks that failed their check: removed, and never used.",
)
DISK_KV_ERRORS = Metric(
    "penstock_disk_kv_errors_total", "counter", "Errors of the operating system with files of KV blocks."
)
PULLED_TOKENS = Metric("penstock_kv_pulled_tokens_total", "counter", "Tokens whose KV blocks came from another engine.")
KV_PULLS = Metric("penstock_kv_pulls_total", "counter", "Prompts whose KV blocks another engine was asked for.")
KV_FAILED_PULLS = Metric(
    "penstock_kv_failed_pulls_total", "counter", "Of those, prompts of which not all came: the rest was computed."
)
KV_PULL_TIME = Metric(
    "penstock_kv_pull_seconds_total",
    "counter",
    "Time from asking to the end, of all pulls together; waiting for what is computed elsewhere included.",
)
KV_SOURCES = Metric(
    "penstock_kv_sources", "gauge", "Engines that this one is connected to, to pull KV blocks, by mover.", ("mover",)
)
LENT_TOKENS = Metric("penstock_kv_lent_tokens_total", "counter", "Tokens whose KV blocks were sent to other engines.")
PREFIX_TOKENS = Metric("penstock_prefix_query_tokens_total", "counter", "Prompt tokens looked up in the prefix cache.")
PREFIX_HIT_TOKENS = Metric("penstock_prefix_hit_tokens_total", "counter", "Prompt tokens found in the prefix cache.")
GENERATED_TOKENS = Metric("penstock_generated_tokens_total", "counter", "Tokens the engine generated.")
DRAFT_TOKENS = Metric("penstock_draft_tokens_total", "counter", "Tokens that were guessed ahead and computed.")
ACCEPTED_TOKENS = Metric(
    "penstock_draft_accepted_tokens_total",
    "counter",
    "Of those, the ones that held: each saved its sequence a step. Over penstock_draft_tokens_total: the acceptance.",
)
FORCED_TOKENS = Metric("penstock_forced_tokens_total", "counter", "Of those, what a guide forced: nobody chose them.")
MASK_WAIT = Metric("penstock_mask_wait_seconds_total", "counter", "Time in which steps waited for guides' masks.")

CATALOG: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
