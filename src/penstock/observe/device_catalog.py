"""Metrics that a replica exports of its devices: of a GPU what NVML or dcgm-exporter tells, else nothing."""

from __future__ import annotations

from penstock.observe.catalog import Metric

MBU = Metric(
    "penstock_mbu_ratio",
    "gauge",
    "Memory bandwidth that recent steps used: weights and KV cache read, over the steps' time, as a share of the most "
    "that was measured on such a device. Absent where nobody measured.",
    ("device_name",),
)
HEALTHY = Metric(
    "penstock_gpu_healthy", "gauge", "0 once a GPU has had an error after which it takes no new work.", ("device",)
)
INFO = Metric(
    "penstock_gpu_info",
    "gauge",
    "1, with what the GPU is and whose: to join the others.",
    ("device", "name", "model"),
)
UTILISATION = Metric(
    "penstock_gpu_utilisation_ratio", "gauge", "Share of the last sampling period in which a kernel ran.", ("device",)
)
MEMORY_USED = Metric("penstock_gpu_memory_used_bytes", "gauge", "Memory in use, whoever uses it.", ("device",))
MEMORY_TOTAL = Metric("penstock_gpu_memory_total_bytes", "gauge", "Memory there is.", ("device",))
POWER = Metric("penstock_gpu_power_watts", "gauge", "Power drawn now.", ("device",))
POWER_LIMIT = Metric("penstock_gpu_power_limit_watts", "gauge", "Power that it may draw.", ("device",))
TEMPERATURE = Metric("penstock_gpu_temperature_celsius", "gauge", "Temperature of the chip.", ("device",))
CLOCK = Metric("penstock_gpu_clock_hertz", "gauge", "Clock now, of sm or memory.", ("device", "domain"))
CLOCK_MAX = Metric("penstock_gpu_clock_max_hertz", "gauge", "The highest that clock can be.", ("device", "domain"))
THROTTLED = Metric(
    "penstock_gpu_throttled",
    "gauge",
    "1 for every reason that holds the clocks down now: power_cap, hw_slowdown, sw_thermal, hw_thermal, power_brake, …",
    ("device", "reason"),
)
ECC_ERRORS = Metric(
    "penstock_gpu_ecc_errors_total",
    "counter",
    "Memory errors since the driver was loaded: corrected, uncorrected.",
    ("device", "kind"),
)
XID_ERRORS = Metric(
    "penstock_gpu_xid_errors_total",
    "counter",
    "Errors that the driver reported, by their number (Xid).",
    ("device", "xid"),
)
RANK_MEMORY = Metric(
    "penstock_rank_memory_bytes",
    "gauge",
    "Memory that a rank of the model has taken, of its process or of its GPU. Only where there are several.",
    ("rank", "node", "device"),
)
RANK_BUSY = Metric(
    "penstock_rank_busy_seconds_total",
    "counter",
    "Time of a rank in steps, waits for other ranks included; on a GPU by the device's clock. Only where there are "
    "several.",
    ("rank", "node", "device"),
)
RANK_COMMUNICATION = Metric(
    "penstock_rank_communication_seconds_total",
    "counter",
    "Time of a rank's steps in communication with others; by its busy time it is communication's share. Measured on "
    "CPUs: sums, gathers and streams between stages, waits included. Estimated on GPUs, whose kernels meet in CUDA "
    "graphs: sums and gathers are counted, each with what one of its size took at the start, without waits.",
    ("rank", "node", "device", "method"),
)
RANK_MBU = Metric(
    "penstock_rank_mbu_ratio",
    "gauge",
    "Memory bandwidth that a rank's recent steps used: its part of the weights and of the KV cache over its busy time, "
    "as a share of the most that was measured on such a device. Absent where nobody measured.",
    ("rank", "node", "device"),
)
OF_RANKS = (RANK_MEMORY, RANK_BUSY, RANK_COMMUNICATION, RANK_MBU)
RANK_EXPERT_TOKENS = Metric(
    "penstock_rank_expert_tokens_total",
    "counter",
    "Tokens that a rank's experts were given; a token counts once for each of its experts. Only where whole experts "
    "are shared out among ranks (ep).",
    ("rank",),
)
EXPERT_IMBALANCE = Metric(
    "penstock_expert_imbalance_ratio",
    "gauge",
    "Tokens of the busiest by the mean, layer by layer, in the last minute in which tokens were routed: among experts, "
    "and among ranks where whole experts are shared out (ep). 1 is even. Only of mixtures of experts.",
    ("among",),
)

DEVICE_CATALOG: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
