"""Everything a user can set for one replica, as small frozen dataclasses: one YAML file, or flags of the same names.

None is "auto": resolved once at start, from the model and the machine, and printed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from penstock.core.slo import Seconds, Slo

Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(gt=0, le=1)]
Role = Literal["both", "prefill", "decode"]


def setting(default: Any, help: str) -> Any:
    """A field with the sentence that documents it, in `--help` and in the reference."""
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class EngineSettings:
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "where the model runs; auto: a GPU if there is one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "number format of what is computed; auto: the fastest on this machine, by measurement; a GPU: bfloat16"
    )
    quant: Literal["auto", "none", "fp8", "int8", "int4", "w8a8"] = setting(
        "auto",
        "number format of linear weights, if not dtype's; auto: as the model's files have them, on a CPU where that is "
        "faster (none: never); int8, int4: integers, "
        "a scale for 128 of them; fp8 and w8a8: 8-bit floats or integers, activations too; fp8 needs a GPU",
    )
    kv_dtype: Literal["auto", "fp8", "int8"] = setting(
        "auto", "number format of the KV cache; auto: as dtype; 8 bits: fp8 on a GPU, int8 on a CPU"
    )
    load: Literal["auto", "dummy"] = setting(
        "auto", "dummy: random weights of the model's shape, for benchmarks; its directory needs no weights"
    )
    max_model_len: Count | None = setting(None, "longest prompt plus output, in tokens; auto: the model's context")
    max_num_seqs: Count | None = setting(None, "most sequences in a batch")
    chunk_tokens: Count | None = setting(None, "most tokens in a step; longer prompts are computed in chunks")
    max_image_tokens: Count | None = setting(
        None,
        "most tokens of an image, and of images whose embeddings are kept beside the KV cache; of a model that takes "
        "images, auto: 16384; fewer leave more of a GPU's memory to the KV cache",
    )
    block_size: Count | None = setting(None, "tokens in a block of the KV cache; with sp, of each rank's part of one")
    memory_fraction: Share | None = setting(
        None,
        "share of a GPU's memory for weights, activations and KV cache together, auto: 0.9; of a CPU's free memory for "
        "the KV cache alone, auto: room for 16,384 tokens, or a whole context",
    )
    kv_gib: Annotated[float, Meta(gt=0)] | None = setting(
        None, "GiB of the device's memory for the KV cache, no more and no less; auto: by memory_fraction"
    )
    prefix_cache: bool = setting(True, "share the KV cache of equal prompt beginnings")
    host_kv_gib: Annotated[float, Meta(gt=0)] | None = setting(
        None,
        "GiB of host memory for KV blocks that the device's cache has no room for; none: what has no room is computed "
        "again. On a CPU rather raise memory_fraction",
    )
    disk_kv_gib: Annotated[float, Meta(gt=0)] | None = setting(
        None,
        "GiB of disk for KV blocks below those in host memory, which it needs (host_kv_gib); they are found again "
        "after a restart. They are made of prompts; none: nothing is written",
    )
    disk_kv_path: str | None = setting(
        None, "directory for these blocks, with a directory of its own for every model; auto: kv in penstock's home"
    )
    disk_kv_age_s: Seconds = setting(86_400.0, "after so long a block is removed from disk, used or not")
    kv_port: Annotated[int, Meta(ge=0, le=65535)] | None = setting(
        None,
        "port at which other replicas with the same gateway_secret pull KV blocks of prompts from this one, and at "
        "which it may pull from them; 0 picks a free one; none: no KV blocks come or go",
    )
    kv_mover: Literal["auto", "shm", "cuda", "nixl", "tcp"] = setting(
        "auto",
        "how the bytes of these blocks move: shm copies them from the memory of a replica on the same machine, cuda "
        "from that of its GPU, nixl reads them by RDMA (penstock[nixl]), tcp sends them; auto: shm on CPUs and cuda on "
        "GPUs where they work, else tcp",
    )
    pooling: Literal["auto", "mean", "last"] = setting(
        "auto", "how a text's embedding is made of its tokens'; auto: as the model's files say, else mean"
    )
    threads: Count | None = setting(
        None, "CPU threads, of each rank; auto: one per core this process may use, shared out among its ranks"
    )
    tp: Count | None = setting(
        None,
        "tensor parallel: ranks, a GPU or a share of the cores each, that split every layer of the model; auto: the "
        "fewest GPUs that it fits on, and on a CPU 1",
    )
    pp: Count | None = setting(
        None,
        "pipeline parallel: stages, of tp ranks each, that have some of the model's layers; auto: 1, or over several "
        "nodes one for each, and on GPUs as many as a whole context needs where layers cannot be split far enough",
    )
    ep: Count | None = setting(
        None,
        "expert parallel, of a mixture of experts: as tp, so that each rank has some of the experts whole; or 1, so "
        "that it has a part of each; auto: 1, or as tp where experts cannot be cut",
    )
    sp: Count | None = setting(
        None,
        "sequence (context) parallel: so many of the tp ranks have the same heads of keys and values and share out the "
        "tokens of every sequence; it divides tp; auto: as many as would else have copies of the same keys and values",
    )
    redundant_experts: Annotated[int, Meta(ge=0)] = setting(
        0,
        "with ep: experts that each rank has beyond its share, for copies of those that most tokens choose; which, is "
        "decided by expert_counts, or while the engine runs (POST /v1/penstock/experts/rebalance)",
    )
    expert_counts: str | None = setting(
        None,
        "with ep: a file of how many tokens chose each expert, recorded by GET /v1/penstock/experts; each rank gets "
        "experts with as much to do; on several nodes each needs the file; none: in the order of their numbers",
    )
    rank_timeout_s: Seconds = setting(
        30.0, "how long a rank waits for another before the replica gives up and starts all of them anew"
    )
    nnodes: Count | None = setting(
        None,
        "nodes (machines) that the ranks are spread over; the same command runs on each of them; auto: as "
        "LeaderWorkerSet's or torchrun's variables say, else 1",
    )
    node_rank: Annotated[int, Meta(ge=0)] | None = setting(
        None,
        "which of the nodes this is; node 0 has the server, the others have ranks alone; auto: by the same variables",
    )
    master_addr: str | None = setting(
        None, "HOST or HOST:PORT of node 0, where the others meet it; auto: by the same variables, and port 29500"
    )
    node_host: str | None = setting(
        None, "address of this node by which other nodes reach it; auto: that of its way to node 0"
    )
    node_timeout_s: Seconds = setting(
        600.0, "how long nodes wait for each other when a replica starts, for the first time or anew"
    )
    insecure_ranks: bool = setting(
        False,
        "several nodes without a secret (PENSTOCK_RANKS_SECRET, or else gateway_secret): whoever reaches them can be "
        "one; false: on loopback addresses only",
    )
    speculate: Literal["auto", "off", "ngram", "draft"] = setting(
        "auto",
        "guess tokens ahead where that pays; no answer changes by it. ngram: from the text so far; draft: with another "
        "model; auto: draft if there is one, else ngram, or on a GPU off",
    )
    draft: str | None = setting(None, "a small model with the same vocabulary, to guess with; named as MODEL is")
    draft_tokens: Count | None = setting(None, "most tokens to guess ahead; auto: ngram 16, draft 6")
    max_loras: Annotated[int, Meta(ge=0)] | None = setting(
        None,
        "most LoRA adapters on the device, and so in one batch; others take turns; 0: none can be used; auto: 8, but "
        "on a GPU, where memory is set aside for each, none unless lora names some",
    )
    max_lora_rank: Annotated[int, Meta(ge=1, le=256)] = setting(
        64, "on a GPU, the rank on every linear layer that memory is set aside for, for each of max_loras"
    )
    max_cpu_loras: Count | None = setting(
        None, "most LoRA adapters in host memory; others are read from disk when they are used; auto: 4 times max_loras"
    )
    parkable: bool = setting(
        False,
        "on a GPU, keep weights and KV cache in memory that can be given back, so that the replica can be parked; on a "
        "CPU it always can",
    )
    step_log: str | None = setting(None, "a file for a line about every step, for `penstock sim calibrate`")


@dataclass(frozen=True)
class ServerSettings:
    host: str = setting("127.0.0.1", "address to listen on")
    port: Annotated[int, Meta(ge=0, le=65535)] = setting(8000, "port to listen on; 0 picks a free one")
    grpc_port: Annotated[int, Meta(ge=0, le=65535)] | None = setting(
        None,
        "port of the Open Inference Protocol over gRPC, on the same host and with the same certificate "
        "(penstock[grpc]); 0 picks a free one; none: HTTP alone, which has it under /v2",
    )
    name: str | None = setting(None, "model id that clients use; auto: from the model's name")
    tool_format: Literal[
        "auto",
        "deepseek",
        "deepseek_v31",
        "glm",
        "granite",
        "harmony",
        "hermes",
        "kimi",
        "llama3",
        "llama4",
        "mistral",
        "mistral_v11",
        "olmo3",
        "smollm2",
    ] = setting("auto", "how the model calls tools; auto: by its chat template")
    reasoning_format: Literal[
        "auto", "none", "think", "seed", "mistral", "granite", "granite_tags", "hunyuan", "harmony"
    ] = setting(
        "auto",
        "how the model writes its thoughts, which are told apart from its answers; auto: by its chat template; none: "
        "they stay in its answers",
    )
    reasoning_budget: Count | None = setting(
        None, "thought tokens of an answer whose request names no budget; none: as many as the model takes"
    )
    max_reasoning_budget: Count | None = setting(
        None, "most thought tokens of any answer: a request's own budget is cut to it; none: no limit"
    )
    role: Role = setting(
        "both",
        "what gateways send to it: prefill computes prompts, whose KV blocks replicas with role decode pull; both "
        "needs no other",
    )
    max_open: Count = setting(512, "most choices being generated or queued; beyond it requests are refused with 429")
    max_body_bytes: Count = setting(8 << 20, "largest request body")
    max_images: Count = setting(16, "most images in a request")
    max_image_bytes: Count = setting(16 << 20, "largest image as it is sent, or fetched; max_body_bytes is for all")
    max_images_bytes: Count = setting(64 << 20, "most bytes of all images of a request, fetched ones among them")
    max_image_pixels: Count = setting(50_000_000, "most pixels of an image, told by its header before it is decoded")
    image_threads: Count = setting(2, "images that are decoded at a time, beside all that is generated")
    max_image_gib: Annotated[float, Meta(gt=0)] = setting(
        2.0, "GiB of fetched and decoded images, of all requests that are open; beyond it requests are refused with 429"
    )
    image_hosts: list[str] = setting(
        [],
        "hosts that images may be fetched from by URL: a name, *.example.com, or * for any that is public; with :PORT "
        "for one that is not the scheme's; none: images come in the request itself (data: URLs)",
    )
    image_timeout_s: Seconds = setting(10.0, "how long an image may take to be fetched")
    deep_health_timeout_s: Seconds = setting(10.0, "how long /health/deep waits for its token")
    tls_cert: str | None = setting(
        None, "PEM file of the certificate and those above it; read again when it changes; none: plain HTTP"
    )
    tls_key: str | None = setting(None, "PEM file of its private key; auto: in the certificate's file")
    client_ca: str | None = setting(
        None, "PEM file of CAs: only clients, such as gateways, with a certificate of one of them may connect"
    )
    gateway_secret: str | None = setting(
        None,
        "what must be known to use this replica, for all but /health and /ready; its gateways send it; better in a "
        "file or in PENSTOCK_GATEWAY_SECRET than on a command line; none: anybody may ask its model, and only callers "
        "on this machine are gateways",
    )
    metrics_token: str | None = setting(
        None,
        "what a scraper of /metrics sends as Authorization: Bearer, so that it need not know gateway_secret; better in "
        "a file or in PENSTOCK_METRICS_TOKEN than on a command line",
    )
    allowed_hosts: list[str] = setting(
        [],
        "without a secret: a name that clients may call it by, and whose web pages may use it, as of a proxy in front "
        "of it; none: on loopback an address or localhost, elsewhere any",
    )
    allowed_origins: list[str] = setting(
        [], "an origin (https://chat.example) whose web pages may use the API from a browser (CORS); *: all; none: none"
    )
    watermark: str | None = setting(
        None, "name of the watermark that every answer gets (penstock watermark add NAME); auto: none"
    )
    watermark_file: str | None = setting(
        None, "where watermarks are kept; auto: PENSTOCK_WATERMARKS, else watermarks.json in penstock's home"
    )
    lora: dict[str, str] = setting({}, "a LoRA adapter to serve beside the model: its name, and a directory of PEFT's")
    adapter_file: str | None = setting(
        None, "where adapters loaded at run time are kept in mind; auto: adapters/MODEL.json in penstock's home"
    )
    drain_timeout_s: Seconds = setting(30.0, "how long running requests may go on after SIGTERM")
    dcgm_url: str | None = setting(
        None, "dcgm-exporter's /metrics: what NVML cannot tell of the GPU is read there; none: NVML alone"
    )


@dataclass(frozen=True)
class TelemetrySettings:
    """Settings of traces and metrics that are pushed over OTLP, by a replica or a gateway. Unset ones are taken from
    OpenTelemetry's environment variables."""

    endpoint: str | None = setting(
        None, "base URL of an OTLP receiver; auto: OTEL_EXPORTER_OTLP_ENDPOINT; without either nothing is pushed"
    )
    protocol: Literal["auto", "http/protobuf", "grpc"] = setting(
        "auto", "auto: OTEL_EXPORTER_OTLP_PROTOCOL, else by the port: grpc at 4317, http/protobuf at others"
    )
    service_name: str | None = setting(None, "auto: OTEL_SERVICE_NAME, else penstock-gateway or penstock-replica")
    traces: bool = setting(True, "push the spans of sampled requests")
    metrics: bool = setting(True, "push what /metrics shows")
    metrics_every_s: Seconds | None = setting(None, "auto: OTEL_METRIC_EXPORT_INTERVAL, else 60")
    sample: Annotated[float, Meta(ge=0, le=1)] | None = setting(
        None, "share of the requests that are traced if their client does not say; auto: OTEL_TRACES_SAMPLER, else 1"
    )
    slow_ttft_s: Seconds = setting(2.0, "requests that waited longer for their first token are kept, sampled or not")
    slow_s: Seconds = setting(60.0, "so are those that took longer in all, and those that failed")
    continue_traces: bool = setting(
        True, "go on with a client's trace, as sampled as it says; false: a new one, with a link to the client's"
    )


@dataclass(frozen=True)
class Settings:
    model: str = setting("smollm2", "an alias, a .gguf file, a Hugging Face directory, or hf:org/name")
    engine: EngineSettings = field(default_factory=EngineSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    slo: Slo = field(default_factory=Slo)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
