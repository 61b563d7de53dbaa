"""Predictions for replicas of several GPUs: `python -m tools.roofline --ranks` prints the table of docs/plan.md.

Nothing here was measured on several GPUs: it is the roofline of one H200 with the communication of `step_cost`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.capacity.formats import SHORT, Formats
from penstock.capacity.hardware import Gpu, hardware
from penstock.capacity.memory import memory_of
from penstock.capacity.model_bytes import pairs
from penstock.capacity.shapes import SHAPES
from penstock.capacity.splitting import split_obstacle
from penstock.capacity.step_cost import PENSTOCK, StepCost
from penstock.core.parallelism import Parallelism

DECODES, CONTEXT, PROMPT = 32, 1024, 8192
_NVLINK = hardware()["h200"]
_LINKS = {"NVLink": _NVLINK, "PCIe": _NVLINK.over_pcie()}


@dataclass(frozen=True)
class Predicted:
    shape: str
    weights: str
    parallelism: Parallelism
    link: str
    alone_s: float  # a step of one decode
    batch_s: float  # of `DECODES`
    batch_share: float  # of that, communication
    prompt_s: float  # a step of `PROMPT` tokens
    prompt_share: float
    tokens_per_s: float  # of output, all decodes of the batch


def predictions() -> Iterator[Predicted]:
    for shape, weights, widths in (
        ("llama8b", "bfloat16", (1, 2, 4, 8)),
        ("llama70b", "bfloat16", (2, 4, 8)),
        ("llama70b", "fp8", (1, 2, 4, 8)),
        ("mixtral-8x7b", "bfloat16", (1, 2, 4, 8)),
    ):
        for link in _LINKS:
            for tp in widths:
                if tp > 1 or link == "NVLink":
                    yield _predicted(shape, weights, Parallelism(tp=tp), "" if tp == 1 else link)
    yield _predicted("llama405b", "bfloat16", Parallelism(tp=8), "NVLink")
    yield _predicted("llama405b", "bfloat16", Parallelism(tp=8, pp=2), "NVLink, two nodes")


def _predicted(shape: str, weights: str, parallelism: Parallelism, link: str) -> Predicted:
    gpu: Gpu = _LINKS["PCIe" if link == "PCIe" else "NVLink"]
    config, formats = SHAPES[shape], Formats(weights)
    assert split_obstacle(config, parallelism) is None
    assert memory_of(config, gpu, formats=formats, parallelism=parallelism).kv_tokens >= DECODES * CONTEXT
    cost = StepCost(config, gpu, PENSTOCK, formats=formats, parallelism=parallelism)
    batch_s, prompt_s = cost.seconds(0, 0, DECODES, DECODES * CONTEXT), cost.seconds(PROMPT, pairs(0, PROMPT), 0, 0)
    return Predicted(
        shape,
        weights,
        parallelism,
        link,
        cost.seconds(0, 0, 1, CONTEXT),
        batch_s,
        cost.communication_s(0, DECODES) / batch_s,
        prompt_s,
        cost.communication_s(PROMPT, 0) / prompt_s,
        parallelism.pp * DECODES / batch_s,  # each stage has a batch of its own
    )


def markdown(found: Iterator[Predicted]) -> str:
    lines = [
        f"| model | weights | ranks | over | one decode, ms | {DECODES} decodes, ms | of it waiting | "
        f"output tokens/s | prompt of {PROMPT:,}, ms | of it waiting |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in found:
        weights = SHORT.get(each.weights, each.weights)
        lines.append(
            f"| {each.shape} | {weights} | {each.parallelism.short} | {each.link} | {1e3 * each.alone_s:.1f} | "
            f"{1e3 * each.batch_s:.1f} | {100 * each.batch_share:.0f} % | {each.tokens_per_s:,.0f} | "
            f"{1e3 * each.prompt_s:,.0f} | {100 * each.prompt_share:.0f} % |"
        )
    return "\n".join(lines)
