"""Numbers of a plan with their units, and a demand in words: the wording that its reports share."""

from __future__ import annotations

from penstock.capacity.demand import Demand
from penstock.capacity.model_bytes import ModelBytes

GIB = 2**30


def lengths_in_words(demand: Demand) -> str:
    per = demand.profile
    spread = "" if len(set(demand.lengths)) == 1 else " on average"
    shared = f", {in_percent(demand.prefix_share)} of the prompt cached" if demand.prefix_share else ""
    return (
        f"prompts of {in_tokens(per.prompt_tokens)} tokens{shared}, outputs of {in_tokens(per.output_tokens)}{spread}"
    )


def in_tokens(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def target_in_words(demand: Demand) -> str:
    target = demand.target
    parts = [f"{name} {in_ms(value)}" for name, value in (("TTFT", target.ttft_s), ("TPOT", target.tpot_s)) if value]
    return f"{100 * target.percentile:g} % within {' and '.join(parts)}" if parts else "no latency target: batch"


def in_dollars(value: float) -> str:
    return f"${float(f'{value:.3g}'):,.0f}"


def in_cents(value: float) -> str:
    """Two figures, without an exponent."""
    return "$" + f"{float(f'{value:.2g}'):.9f}".rstrip("0").rstrip(".")


def three_figures(value: float) -> str:
    return f"{float(f'{value:.3g}'):,g}"


def in_gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.3g} GiB" if num_bytes < 1000 * GIB else f"{num_bytes / GIB:,.0f} GiB"


def in_percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def in_kib(model: ModelBytes) -> str:
    return f"{model.kv_bytes_per_token / 1024:,.0f} KiB"


def in_ms(seconds: float) -> str:
    return f"{float(f'{1000 * seconds:.3g}'):,g} ms" if seconds < 10 else f"{seconds:,.3g} s"
