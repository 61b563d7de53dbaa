"""Predictions for replicas of several GPUs as text: a table, and all that it assumes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from penstock.capacity.figures import in_gib, in_ms, in_percent, lengths_in_words, target_in_words, three_figures
from penstock.capacity.hardware import Gpu
from penstock.capacity.plan import Case
from penstock.capacity.prediction import CONTEXT, DECODES, PROMPT, Prediction, Predictions
from penstock.capacity.report import BOUNDS, listed, table
from penstock.capacity.steady import MAX_UTILISATION
from penstock.capacity.step_cost import ENGINES, NCCL_SUM_US


def text(predicted: Predictions, name: str) -> str:
    case, gpus, found = predicted.case, predicted.gpus, predicted.found
    return "\n\n".join((_head(predicted, name), _table(case, found), _assumptions(case, gpus, found)))


def as_json(predicted: Predictions) -> bytes:
    return msgspec.json.format(msgspec.json.encode(predicted.found))


def _head(predicted: Predictions, name: str) -> str:
    case, gpu = predicted.case, predicted.gpus[0]
    num_gpus = max(each.parallelism.num_ranks * each.num_replicas for each in predicted.found)
    nodes = "" if num_gpus <= gpu.per_node else f" on {num_gpus // gpu.per_node} nodes"
    return (
        f"PREDICTED, not measured: {name}, {predicted.formats}, on {num_gpus} x {gpu.name}{nodes}, {case.engine}'s "
        f"engine\n{lengths_in_words(case.demand)}; {target_in_words(case.demand)}"
    )


def _table(case: Case, found: Iterable[Prediction]) -> str:
    percent = f"p{100 * case.demand.target.percentile:g}"
    rows = [
        [
            "a replica",
            "GPU weights",
            "KV tokens",
            "1 decode",
            f"{DECODES} decodes",
            "waiting",
            f"prompt of {PROMPT:,}",
            "waiting",
            "requests/s",
            "tokens/s out",
            f"TTFT {percent}",
            "TPOT p50",
            "all, requests/s",
            "over",
        ]
    ]
    rows += [_row(each) for each in found]
    return table(rows)


def _row(each: Prediction) -> list[str]:
    name, weights = each.parallelism.short, in_gib(each.memory.weight_bytes)
    if each.steps is None:
        return [name, weights, "do not fit", *[""] * 10, each.over]
    steps, expected = each.steps, each.expected
    cells = [
        name,
        weights,
        f"{each.memory.kv_tokens:,}",
        in_ms(steps.decode_s),
        in_ms(steps.batch_s),
        in_percent(steps.batch_share),
        in_ms(steps.prompt_s),
        in_percent(steps.prompt_share),
    ]
    if expected is None:
        return [*cells, "0", "", "", "", "0", f"{each.over}; bound by {BOUNDS[each.bound]}"]
    return [
        *cells,
        three_figures(each.rate),
        three_figures(each.output_tokens_per_s),
        in_ms(expected.ttft_p_s),
        in_ms(expected.tpot_p50_s) if expected.tpot_p50_s is not None else "",
        three_figures(each.rate * each.num_replicas),
        each.over,
    ]


def _assumptions(case: Case, gpus: Sequence[Gpu], found: Sequence[Prediction]) -> str:
    share = f"{ENGINES[case.engine].bandwidth_efficiency:g} of it used"
    lines = [
        f"steps: each decode has {CONTEXT:,} tokens of context; a pipeline has such a batch for each stage, and a step "
        "is its way through all of them; the roofline's constants are fitted on one H200 (docs/plan.md)",
        f"requests/s: the most within the targets, {in_percent(MAX_UTILISATION)} of the GPUs' time at most, with "
        f"{case.max_num_seqs} sequences and {case.chunk_tokens:,} tokens in a step at most; TTFT and TPOT at that rate",
        "waiting: two all-reduces a layer, one after the embedding, a gather of logits; none overlaps with other work",
    ]
    lines += [
        f"{gpu.link}: {gpu.link_gb_s:g} GB/s in one direction, {share}; an all-reduce {gpu.link_latency_us:g} µs and "
        "its bytes, however many ranks"
        for gpu in {gpu.link: gpu for gpu in gpus}.values()
    ]
    if any(each.num_nodes > 1 for each in found):
        lines += [
            f"{gpu.network_name}: {gpu.network_gb_s:g} GB/s for {'a node' if gpu.shares_network else 'each GPU'}, "
            f"{share}; a message {gpu.network_latency_us:g} µs, an all-reduce over nodes so much and {NCCL_SUM_US:g} "
            "µs within them"
            for gpu in {gpu.network_name: gpu for gpu in gpus}.values()
        ]
        if wide_us := ENGINES[case.engine].wide_sum_us:
            lines.append(
                f"within nodes of a replica that has several, an all-reduce takes {wide_us:g} µs at least (NCCL)"
            )
    if any(each.parallelism.ep > 1 for each in found):
        lines.append("experts are chosen evenly: a rank whose experts are asked for more often is not waited for")
    return listed("Assumed", lines)
