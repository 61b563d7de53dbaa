from __future__ import annotations

import sys
from collections.abc import Callable

from .adapters import adapters, sweep_adapters
from .attention import decodes, prefills, shared, sweep_decode, sweep_plan, sweep_prefill
from .blocks import blocks, sweep_q6k
from .experts import mixtures, routers, sweep_experts
from .linears import linears, products, small, sweep_gemv, sweep_w4a16

PARTS: dict[str, Callable[[], None]] = {
    "small": small,
    "linears": linears,
    "blocks": blocks,
    "decode": decodes,
    "shared": shared,
    "prefill": prefills,
    "adapters": adapters,
    "products": products,
    "experts": mixtures,
    "routers": routers,
    "sweep-experts": sweep_experts,
    "sweep-gemv": sweep_gemv,
    "sweep-adapters": sweep_adapters,
    "sweep-w4a16": sweep_w4a16,
    "sweep-q6k": sweep_q6k,
    "sweep-decode": sweep_decode,
    "sweep-plan": sweep_plan,
    "sweep-prefill": sweep_prefill,
}

if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # a run that is cut short leaves what it has measured
    for part in sys.argv[1:] or ["small", "linears", "decode", "shared", "prefill"]:
        PARTS[part]()
