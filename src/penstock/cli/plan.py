"""`penstock plan`: what a model under a load needs, what it costs, and what would cost less."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a shape (llama8b, llama70b, …), hf:org/name, a directory, a config.json, a .gguf, or numbers: "
        "hidden=8192,ffn=28672,layers=80,heads=64,kv_heads=8",
    )
    asked = parser.add_argument_group("what is asked")
    asked.add_argument(
        "--rate", type=float, metavar="X", help="requests per second at the peak; a trace's own otherwise"
    )
    asked.add_argument(
        "--prompt",
        default="512",
        metavar="TOKENS",
        help="length of prompts: 512, 128:2048 (uniform), normal:MEAN:SD, lognormal:MEAN:SD (default: 512)",
    )
    asked.add_argument("--output", default="256", metavar="TOKENS", help="length of outputs, likewise (default: 256)")
    asked.add_argument("--trace", type=Path, metavar="FILE", help="lengths and shared prefixes of a trace instead")
    asked.add_argument(
        "--prefix-share", type=float, metavar="X", help="share of prompt tokens found in a cache, 0 to 1"
    )
    asked.add_argument("--ttft", type=duration, default=0.5, metavar="S", help="0.2, 200ms or none (default: 0.5)")
    asked.add_argument("--tpot", type=duration, default=0.1, metavar="S", help="likewise, per token (default: 0.1)")
    asked.add_argument(
        "--percentile", type=float, default=95.0, metavar="P", help="who keeps them, in %% (default: 95)"
    )
    chosen = parser.add_argument_group("what is given (all else is chosen)")
    chosen.add_argument("--gpu", metavar="NAME,…", help="of --list-hardware; several: h100,h200 (default: all)")
    chosen.add_argument("--quant", metavar="FORMAT", help="bf16, fp8, int8, int4 (default: the model's own)")
    chosen.add_argument("--kv", default="bf16", metavar="FORMAT", help="of the KV cache: bf16, fp8 (default: bf16)")
    chosen.add_argument("--tp", type=int, metavar="N", help="GPUs that share every layer (default: the cheapest)")
    chosen.add_argument("--pp", type=int, metavar="N", help="stages of a pipeline (default: the cheapest)")
    chosen.add_argument(
        "--ep",
        type=int,
        metavar="N",
        help="as --tp: GPUs among which whole experts are shared out (default: where they cannot be cut)",
    )
    chosen.add_argument(
        "--sp",
        type=int,
        metavar="N",
        help="of --tp, GPUs among which tokens of a sequence are shared out (default: where they would keep copies)",
    )
    chosen.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="predict what so many of one --gpu do with the model, in every layout, whatever the rate",
    )
    chosen.add_argument("--nodes", type=int, metavar="N", help="that --gpus are on (default: the fewest)")
    chosen.add_argument(
        "--link",
        metavar="NAME,…",
        help="between GPUs of a node: own, that of the table, or pcie (default: own); several with --gpus",
    )
    chosen.add_argument(
        "--network",
        metavar="NAME,…",
        help="between nodes: own, ib400 (InfiniBand), 100gbe (default: own); several with --gpus",
    )
    chosen.add_argument("--engine", choices=["vllm", "penstock"], default="vllm", help="whose speed (default: vllm)")
    chosen.add_argument("--max-num-seqs", type=int, default=256, metavar="N", help="in a batch (default: 256)")
    chosen.add_argument("--chunk-tokens", type=int, default=8192, metavar="N", help="in a step (default: 8192)")
    chosen.add_argument("--spare", type=int, default=0, metavar="N", help="replicas beyond the load's (default: 0)")
    chosen.add_argument("--hardware", type=Path, metavar="FILE", help="TOML that adds GPUs, or overrides their figures")
    bill = parser.add_argument_group("a bill to bring down")
    bill.add_argument(
        "--current",
        metavar="KEY=VALUE,…",
        help="what runs today: gpu=h100 and count=228 or bill=500000 (a month; both: your price), and tp, pp, quant, "
        "kv, prefix=off where you know them. Without --rate, the load is what that carries within the targets",
    )
    bill.add_argument("--halve", action="store_true", help="the steps to half of today's bill")
    bill.add_argument("--budget", type=money, metavar="X", help="the steps to this much a month: 500000 or 500k")
    parser.add_argument("--list-hardware", action="store_true", help="print the table of GPUs and end")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(arguments: argparse.Namespace) -> None:
    from penstock.capacity import prediction_report, report
    from penstock.capacity.answer import as_json, text
    from penstock.cli.plan_inputs import answer_for, model_config, predictions_for, table_of
    from penstock.core.errors import ConfigError

    if arguments.list_hardware:
        print(report.hardware_table(table_of(arguments)))
        return
    if arguments.model is None:
        raise ConfigError("which model? `penstock plan llama70b --rate 100`", param="model")
    config = model_config(arguments.model)
    if arguments.gpus is not None:
        predicted = predictions_for(arguments, config)
        print(
            prediction_report.as_json(predicted).decode()
            if arguments.json
            else prediction_report.text(predicted, arguments.model)
        )
        return
    answer = answer_for(arguments, config)
    print(as_json(answer, arguments.model).decode() if arguments.json else text(answer, arguments.model))


def duration(text: str) -> float | None:
    """Seconds, or with its unit; none: no target."""
    if text == "none":
        return None
    for unit, factor in (("ms", 1e-3), ("s", 1.0), ("", 1.0)):
        if text.endswith(unit):
            try:
                return float(text.removesuffix(unit)) * factor
            except ValueError:
                break
    raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 0.2, 200ms or none")


def money(text: str) -> float:
    factor = {"k": 1e3, "m": 1e6}.get(text[-1:].lower(), 1.0)
    try:
        value = float(text.rstrip("kKmM").replace(",", "").replace("_", "")) * factor
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount such as 500000 or 500k")
    return value
