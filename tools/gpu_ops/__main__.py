from __future__ import annotations

import sys
from collections.abc import Callable

from .adapters import adapters, sweep_adapters
from .attention import decodes, prefills, shared, sweep_decode, sweep_plan, sweep_prefill
from .blocks import blocks, sweep_fine
from .experts import mixtures, routers, sweep_experts
from .linears import linears, products, small, sweep_grouped, sweep_thin

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
    "sweep-thin": sweep_thin,
    "sweep-adapters": sweep_adapters,
    "sweep-grouped": sweep_grouped,
    "sweep-fine": sweep_fine,
    "sweep-decode": sweep_decode,
    "sweep-plan": sweep_plan,
    "sweep-prefill": sweep_prefill,
}

if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # a run that is cut short leaves what it has measured
    for part in sys.argv[1:] or ["small", "linears", "decode", "shared", "prefill"]:
        PARTS[part]()
