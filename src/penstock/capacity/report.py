"""A plan as text, for whoever has to decide on it: what is needed, why, what it costs, what would cost less."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.capacity.changes import Outcome, Price
from penstock.capacity.demand import Demand
from penstock.capacity.figures import (
    in_cents,
    in_dollars,
    in_gib,
    in_kib,
    in_ms,
    in_percent,
    lengths_in_words,
    target_in_words,
    three_figures,
)
from penstock.capacity.formats import SHORT, Formats
from penstock.capacity.hardware import Gpu
from penstock.capacity.memory import MEMORY_FRACTION
from penstock.capacity.model_bytes import ModelBytes
from penstock.capacity.plan import HOURS_PER_MONTH, Case, Layout
from penstock.capacity.steady import MAX_UTILISATION
from penstock.core.model_config import ModelConfig
from penstock.terminal.tables import aligned

SAME, SHOWN = (
    0.995,
    3.0,
)  # cost as a share of the plan's: below the first it is cheaper, above the second beside the point
IN_RETURN = {
    Price.WORK: "",
    Price.QUALITY: "quality: measure it",
    Price.HARDWARE: "other hardware",
    Price.LATENCY: "latency",
}
BOUNDS = {
    "weights": "weights do not fit",
    "kv memory": "KV memory",
    "sequences": "the batch (--max-num-seqs)",
    "ttft": "TTFT",
    "tpot": "TPOT",
    "utilisation": f"utilisation (at most {100 * MAX_UTILISATION:.0f} %)",
}


def head(case: Case, name: str, formats: Formats) -> str:
    config, model, demand = case.config, ModelBytes(case.config, formats), case.demand
    return "\n".join(
        (
            f"model     {name}: {_parameters(config)}, {config.num_layers} layers, "
            f"{config.num_heads} heads over {_kept(config)}",
            f"          {formats}: weights {in_gib(model.stored_bytes)}, KV cache {in_kib(model)} a token",
            f"asked     {three_figures(demand.rate)} requests/s; {lengths_in_words(demand)}",
            f"          {target_in_words(demand)}",
        )
    )


def _kept(config: ModelConfig) -> str:
    if config.latent is not None:
        return f"one latent of {config.head_dim} numbers"
    return f"{config.num_kv_heads} of keys and values"


def _parameters(config: ModelConfig) -> str:
    found = f"{config.num_parameters / 1e9:.3g} billion parameters"
    if config.experts is None:
        return found
    active = f"{config.num_active_parameters / 1e9:.3g} billion active"
    return f"{found} ({active}: {config.experts.per_token} of {config.experts.count} experts)"


def need(case: Case, layout: Layout) -> str:
    """The answer."""
    assert layout.expected is not None
    demand, expected, setup = case.demand, layout.expected, layout.setup
    each, per = demand.rate / layout.num_replicas, demand.profile
    percent = f"p{100 * demand.target.percentile:g}"
    spare = f", {case.num_spare} of them spare" if case.num_spare else ""
    tpot = "no TPOT: one token each"
    if expected.tpot_p50_s is not None and expected.tpot_p_s is not None:
        tpot = f"TPOT {in_ms(expected.tpot_p50_s)} p50, {in_ms(expected.tpot_p_s)} {percent}"
    return "\n".join(
        (
            f"YOU NEED  {layout.num_gpus:,} x {setup.gpu}: {_replicas(layout)} of "
            f"{_gpus(layout)} ({layout.parallelism.short}){spare}, {setup.formats}",
            f"cost      {in_dollars(layout.cost_per_month)} a month; {_tokens_cost(demand, layout)}",
            f"expected  TTFT {in_ms(expected.ttft_p50_s)} p50, {in_ms(expected.ttft_p_s)} {percent}; {tpot}",
            f"replica   carries {three_figures(layout.rate_per_replica)} requests/s within the targets and gets "
            f"{three_figures(each)}; what stands against more is {BOUNDS[layout.bound]}",
            f"          {three_figures(each * per.prompt_tokens)} prompt and "
            f"{three_figures(each * per.output_tokens)} output tokens/s, "
            f"{expected.num_decodes * layout.parallelism.pp:.0f} sequences at once, "
            f"{in_percent(expected.utilisation)} of what its GPUs can do",
            f"memory    of a GPU: weights {in_gib(layout.memory.weight_bytes)}, "
            f"steps {in_gib(layout.memory.step_bytes)}, {_states(layout)}KV {in_gib(layout.memory.kv_bytes)}",
            f"          a replica holds {layout.memory.kv_tokens:,} tokens of KV: {layout.num_sequences:,} sequences",
        )
    )


def _states(layout: Layout) -> str:
    found = layout.memory.state_bytes
    return f"recurrent states {in_gib(found)}, " if found else ""


def parallelism(case: Case, chosen: Layout, judged: Sequence[Layout]) -> str:
    """Every layout on the chosen GPU, and why it is not the one."""
    percent = f"{100 * case.demand.target.percentile:g}"
    rows = [["", "GPU weights", "sequences", f"TTFT p{percent} alone", "requests/s", "GPUs", "a month", ""]]
    for each in judged:
        is_chosen = each.parallelism == chosen.parallelism
        rows.append(
            [
                each.parallelism.short,
                in_gib(each.memory.weight_bytes),
                f"{each.num_sequences:,}",
                in_ms(each.alone.ttft_p_s) if each.alone else "",
                three_figures(each.rate_per_replica) if each.is_possible else "",
                f"{each.num_gpus:,}" if each.is_possible else "",
                in_dollars(each.cost_per_month) if each.is_possible else "",
                "chosen: the cheapest" if is_chosen else _why_not(each),
            ]
        )
    fits = next((each for each in judged if each.alone), None)
    sane = SHOWN * chosen.cost_per_month  # a replica that holds one sequence keeps all targets, if you have many of it
    keeps = next((each for each in judged if each.cost_per_month < sane), None)
    said = f"Smallest that fits: {fits.parallelism.short if fits else 'none'}. "
    if keeps:
        said += (
            f"Smallest that keeps the targets: {keeps.parallelism.short}, {in_dollars(keeps.cost_per_month)} a month. "
        )
    return f"Parallelism on {chosen.setup.gpu}\n{table(rows)}\n{said}Chosen: {chosen.parallelism.short}."


def formats_table(case: Case, found: Sequence[tuple[Formats, Layout | None]], gpu: str) -> str:
    rows = [["weights", "KV", "in all", "KV a token", "layout", "sequences", "GPUs", "a month"]]
    for formats, layout in found:
        model = ModelBytes(case.config, formats)
        names = [SHORT.get(each, each) for each in (formats.weights, formats.kv)]
        sizes = [in_gib(model.stored_bytes), in_kib(model)]
        plan = ["does not keep the targets", "", "", ""]
        if layout:
            plan = [
                layout.parallelism.short,
                f"{layout.num_sequences:,}",
                f"{layout.num_gpus:,}",
                in_dollars(layout.cost_per_month),
            ]
        rows.append([*names, *sizes, *plan])
    return f"Number formats on {gpu}\n{table(rows)}"


def alternatives_table(chosen: Layout, found: Sequence[Outcome]) -> str:
    rows = [["", "GPUs", "replicas", "a month", "saves", "in return"]]
    dear = []
    for each in found:
        ratio = each.layout.cost_per_month / chosen.cost_per_month
        if ratio < SAME or (ratio < SHOWN and each.change.price in (Price.WORK, Price.HARDWARE)):
            rows.append([each.change.name, *_saving(each, chosen.cost_per_month)])
        elif each.change.price is Price.HARDWARE or each.layout.setup.gpu == chosen.setup.gpu:
            dear.append(each.change.name)
    rest = f"\nNot cheaper: {', '.join(dear)}." if dear else ""
    return f"Instead, each alone, cheapest first\n{table(rows)}{rest}"


def path_table(name: str, start: str, start_cost: float, goal: float, steps: Sequence[Outcome]) -> str:
    rows = [
        ["", "GPUs", "replicas", "a month", "saves", "in return"],
        [name, start, "", in_dollars(start_cost), "", ""],
    ]
    cost = start_cost
    for number, each in enumerate(steps, 1):
        rows.append([f"{number} {each.change.name}", *_saving(each, cost)])
        cost = each.layout.cost_per_month
    saved = f"{in_dollars(cost)} a month, {in_percent(1 - cost / start_cost)} less"
    verdict = f"Reached: {saved}." if cost <= goal else f"Not reached: {saved}, is the least that was found."
    title = f"From {in_dollars(start_cost)} to {in_dollars(goal)} a month, one step after the other"
    return f"{title}\n{table(rows)}\n{verdict}"


def assumptions(case: Case, layout: Layout) -> str:
    gpu = case.hardware[layout.setup.gpu]
    name, engine, share = layout.setup.gpu, case.engine, case.demand.prefix_share
    lines = [
        f"prices: {gpu.price_per_hour:.3g} $/h for one {name}, {HOURS_PER_MONTH} hours a month, GPUs only; what "
        "providers ask differs 3 times: put yours into --hardware FILE",
        f"speed: a roofline over datasheets with {engine}'s four constants, fitted on one H200 to 16 % (docs/plan.md); "
        "other GPUs, and several per replica, by the same constants: not measured",
        "latency: prompts queue (M/G/1) before a batching engine, arrivals are Poisson's, replicas are filled evenly; "
        "TTFT is the engine's, without the network",
        f"memory: {in_percent(MEMORY_FRACTION)} of each GPU is used; a step has at most {case.max_num_seqs} sequences "
        f"and {case.chunk_tokens:,} tokens",
    ]
    if share:
        lines.append(
            f"{in_percent(share)} of prompt tokens are in the cache of the replica that is asked; that saves no KV "
            "memory"
        )
    if layout.parallelism.num_ranks > 1:
        latency = f"{gpu.link_latency_us:g} µs for each all-reduce"
        lines.append(
            f"ranks: two all-reduces a layer over {gpu.link_gb_s:g} GB/s, {latency} (assumed); nothing of it overlaps"
        )
    if layout.parallelism.ep > 1:
        lines.append("experts are chosen evenly: a rank whose experts are asked for more often is not waited for")
    if layout.parallelism.sp > 1:
        lines.append("ranks that share out tokens exchange queries and results in every layer; nothing of it overlaps")
    if layout.parallelism.pp > 1:
        lines.append("a pipeline has as many micro-batches under way as stages, and no stage waits")
    if case.config.windows:
        lines.append("sliding windows are ignored: every layer keeps and reads the whole context (an upper bound)")
    return listed("Assumed", lines)


def listed(title: str, lines: Sequence[str]) -> str:
    return f"{title}\n" + "\n".join(f"  - {line}" for line in lines)


def hardware_table(hardware: dict[str, Gpu]) -> str:
    rows = [["", "name", "$/h", "GiB", "TB/s", "TFLOP/s bf16", "fp8", "int8", "link GB/s", "network GB/s", "per node"]]
    for key, gpu in hardware.items():
        flops = [f"{gpu.tflops[name]:,g}" if name in gpu.tflops else "-" for name in ("bfloat16", "fp8", "int8")]
        figures = [f"{gpu.price_per_hour:.2f}", f"{gpu.memory_gib:g}", f"{gpu.bandwidth_tb_s:g}", *flops]
        rows.append([key, gpu.name, *figures, f"{gpu.link_gb_s:g}", f"{gpu.network_gb_s:g}", str(gpu.per_node)])
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    """First and last columns to the left, those between to the right."""
    return "\n".join(f"  {line}" for line in aligned(rows, left=(0, len(rows[0]) - 1)))


def _saving(outcome: Outcome, before: float) -> list[str]:
    layout, change = outcome.layout, outcome.change
    saved = 1 - layout.cost_per_month / before
    return [
        f"{layout.num_gpus:,} x {layout.setup.gpu}",
        f"{layout.num_replicas:,} {layout.parallelism.short}",
        in_dollars(layout.cost_per_month),
        f"{in_percent(saved)}" if saved >= 0 else f"costs {in_percent(-saved)} more",
        "; ".join(part for part in (IN_RETURN[change.price], change.note) if part),
    ]


def _why_not(layout: Layout) -> str:
    if layout.is_possible:
        return f"bound by {BOUNDS[layout.bound]}"
    if layout.bound == "ttft" and layout.alone:
        return "TTFT too long even alone"
    return {
        "weights": "weights do not fit",
        "kv memory": "no room for the KV cache",
        "tpot": "TPOT too long even alone",
    }[layout.bound]


def _tokens_cost(demand: Demand, layout: Layout) -> str:
    per = demand.profile
    thousands = demand.rate * 3600 * HOURS_PER_MONTH / 1000
    both = layout.cost_per_month / (thousands * (per.prompt_tokens + per.output_tokens))
    output = layout.cost_per_month / (thousands * per.output_tokens)
    return f"{in_cents(both)} per 1,000 tokens, {in_cents(output)} per 1,000 of output"


def _replicas(layout: Layout) -> str:
    return "one replica" if layout.num_replicas == 1 else f"{layout.num_replicas:,} replicas"


def _gpus(layout: Layout) -> str:
    count = layout.parallelism.num_ranks
    return "one GPU" if count == 1 else f"{count} GPUs"
