"""Metrics of a replica under vLLM's names, for those who read model servers by them: stock Endpoint Pickers."""

from penstock.observe.catalog import Metric

RUNNING = Metric("vllm:num_requests_running", "gauge", "As penstock_sequences_running.", ("model_name",))
WAITING = Metric("vllm:num_requests_waiting", "gauge", "As penstock_sequences_waiting.", ("model_name",))
KV_USAGE = Metric("vllm:kv_cache_usage_perc", "gauge", "As penstock_kv_usage_ratio: 1 is full.", ("model_name",))
CACHE_CONFIG = Metric(
    "vllm:cache_config_info",
    "gauge",
    "The KV cache's block size, in tokens, and its blocks.",
    ("block_size", "num_gpu_blocks"),
)
LORA_REQUESTS = Metric(
    "vllm:lora_requests_info",
    "gauge",
    "LoRA adapters on the device, by name; the value is the time. None are told to wait.",
    ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
)

VLLM_CATALOG = (RUNNING, WAITING, KV_USAGE, CACHE_CONFIG, LORA_REQUESTS)
