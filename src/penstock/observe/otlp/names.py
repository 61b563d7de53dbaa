"""Names of our metrics in OpenTelemetry: by its conventions for generative AI where those have a name, else by
ours with dots. The docs page is generated from this."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from penstock.observe import catalog, gateway_catalog
from penstock.observe.catalog import Metric

PROVIDER = "penstock"  # gen_ai.provider.name
_COMMON = {"gen_ai.provider.name": PROVIDER}
_UNITS = {
    "_seconds": "s",
    "_bytes": "By",
    "_ratio": "1",
    "_tokens": "{token}",
    "_watts": "W",
    "_hertz": "Hz",
    "_celsius": "Cel",
    "_sequences": "{sequence}",
}
_KEPT = ("_tokens", "_sequences", "_watts", "_hertz", "_celsius")  # a unit that is also the name of the thing


class Named(NamedTuple):
    name: str
    unit: str
    fixed: Mapping[str, str] = {}  # attributes that all its points have
    is_genai: bool = False

    def attribute(self, label: str) -> str:
        if self.is_genai and label == "model":
            return "gen_ai.request.model"
        return f"penstock.{label}"


def _genai(name: str, unit: str = "s", **fixed: str) -> Named:
    return Named(name, unit, _COMMON | {key.replace("__", "."): value for key, value in fixed.items()}, True)


_GENAI: dict[Metric, Named] = {
    catalog.TTFT: _genai("gen_ai.server.time_to_first_token"),
    catalog.TPOT: _genai("gen_ai.server.time_per_output_token"),
    catalog.REQUEST_LATENCY: _genai("gen_ai.server.request.duration"),
    catalog.PROMPT_TOKENS: _genai("gen_ai.client.token.usage", "{token}", gen_ai__token__type="input"),
    catalog.OUTPUT_TOKENS: _genai("gen_ai.client.token.usage", "{token}", gen_ai__token__type="output"),
    # A gateway's are told from its replicas' by service.name.
    gateway_catalog.TTFT: _genai("gen_ai.server.time_to_first_token"),
    gateway_catalog.REQUEST_LATENCY: _genai("gen_ai.server.request.duration"),
}


@cache
def named(metric: Metric) -> Named:
    if metric in _GENAI:
        return _GENAI[metric]
    name = metric.name.removesuffix("_total")
    unit = "1"
    for suffix, found in _UNITS.items():
        if name.endswith(suffix):
            unit = found
            name = name if suffix in _KEPT else name.removesuffix(suffix)
            break
    head, *rest = name.split("_")
    if rest and rest[0] in ("gateway", "gpu", "slo", "kv"):
        head, rest = f"{head}.{rest[0]}", rest[1:]
    return Named(".".join(filter(None, (head, "_".join(rest)))), unit)
