"""Inputs of `penstock plan`, from flags and files to the terms of `capacity`."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.capacity.answer import Answer, Bill, answer
from penstock.capacity.demand import Demand, Target
from penstock.capacity.formats import Formats, kv_format, weight_format
from penstock.capacity.hardware import NETWORKS, Gpu, Table, find_gpu, hardware
from penstock.capacity.plan import HOURS_PER_MONTH, Case, Setup, layouts
from penstock.capacity.prediction import Predictions, check_count, predictions
from penstock.capacity.shapes import SHAPES, shape_from_numbers
from penstock.capacity.splitting import splits_over, told_obstacle
from penstock.cli.plan import money
from penstock.core.config import nearest
from penstock.core.errors import ConfigError
from penstock.core.model_config import ModelConfig
from penstock.core.parallelism import Parallelism
from penstock.workload.lengths import Lengths
from penstock.workload.trace import BLOCK_TOKENS, Arrival, read_trace

SAMPLE = 1000  # requests that a distribution is known by
CURRENT_KEYS = ("gpu", "count", "bill", "tp", "pp", "quant", "kv", "prefix")


@dataclass(frozen=True)
class Load:
    """Requests to plan for: those of a trace, or a sample of distributions."""

    lengths: list[tuple[int, int]]  # (prompt, output): of all requests of a trace, or of a sample
    prefix_share: float
    rate: float | None = None  # a trace's own


@dataclass(frozen=True)
class Current:
    """The setup that runs today, as far as it was told."""

    gpu: str
    count: int | None
    bill: float | None
    tp: int | None
    pp: int | None
    quant: str | None
    kv: str
    uses_prefix_cache: bool


def model_config(spec: str) -> ModelConfig:
    if spec in SHAPES:
        return SHAPES[spec]
    if "=" in spec:
        return shape_from_numbers(spec)
    from penstock.hub.config_only import read_config

    if (hint := nearest(spec, SHAPES)) and not Path(spec).exists():
        raise ConfigError(f"no model {spec!r}; did you mean the shape {hint!r}?", param="model")
    return read_config(spec)


def read_current(text: str) -> Current:
    values: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if key not in CURRENT_KEYS or not equals:
            hint = nearest(key, CURRENT_KEYS)
            known = f"did you mean {hint!r}?" if hint else f"those are {', '.join(CURRENT_KEYS)}"
            raise ConfigError(f"{part!r} is not KEY=VALUE of what runs today; {known}")
        values[key] = value
    if "gpu" not in values or not {"count", "bill"} & values.keys():
        raise ConfigError("what runs today needs gpu, and count or bill")
    if values.get("prefix", "on") not in ("on", "off"):
        raise ConfigError("prefix is on or off")
    counts = {key: _count(values[key], key) if key in values else None for key in ("count", "tp", "pp")}
    return Current(
        gpu=values["gpu"],
        count=counts["count"],
        bill=_bill_of(values["bill"]) if "bill" in values else None,
        tp=counts["tp"],
        pp=counts["pp"],
        quant=values.get("quant"),
        kv=values.get("kv", "bf16"),
        uses_prefix_cache=values.get("prefix", "on") == "on",
    )


def table_of(arguments: argparse.Namespace) -> Table:
    path: Path | None = arguments.hardware
    try:
        return hardware(path.read_text() if path else None, where=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def joined(gpu: Gpu, links: str | None, networks: str | None) -> list[Gpu]:
    """A GPU with each of these links and networks: names as flags have them, or None for those of the table."""
    found = []
    for link in _ways(links, ["pcie"], "link"):
        own = gpu.over_pcie() if link == "pcie" else gpu
        found += [
            own if network == "own" else own.over(NETWORKS[network])
            for network in _ways(networks, [*NETWORKS], "network")
        ]
    return found


def _ways(names: str | None, known: Sequence[str], param: str) -> list[str]:
    wanted = (names or "own").split(",")
    for name in wanted:
        if name not in ("own", *known):
            raise ConfigError(f"no {param} {name!r}; there are own, {', '.join(known)}", param=param)
    return wanted


def predictions_for(arguments: argparse.Namespace, config: ModelConfig) -> Predictions:
    """Predictions of every layout of `--gpus`."""
    for name in ("tp", "pp", "ep", "sp", "current", "budget"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--gpus predicts every layout, and takes no --{name}", param=name)
    if not arguments.gpu or "," in arguments.gpu:
        raise ConfigError("--gpus of which kind? --gpu h200 names one", param="gpu")
    table = table_of(arguments)
    gpu = find_gpu(table, arguments.gpu)
    num_nodes = arguments.nodes if arguments.nodes is not None else max(1, -(-arguments.gpus // gpu.per_node))
    check_count(arguments.gpus, num_nodes)
    gpu = replace(gpu, per_node=arguments.gpus // num_nodes)
    load = _load(arguments, config)
    case = _case(arguments, config, table, load, rate=1.0)  # the most is looked for
    formats = Formats(_weights(arguments.quant, config), kv_format(arguments.kv))
    if not gpu.supports(formats):
        raise ConfigError(_no_fp8(arguments.gpu), param="quant")
    gpus = joined(gpu, arguments.link, arguments.network)
    found = predictions(case, Setup(arguments.gpu, formats), arguments.gpus, gpus)
    return Predictions(case, formats, gpus, list(found))


def answer_for(arguments: argparse.Namespace, config: ModelConfig) -> Answer:
    table = {name: _joined_alone(arguments, gpu) for name, gpu in table_of(arguments).items()}
    current = read_current(arguments.current) if arguments.current else None
    if arguments.halve and current is None:
        raise ConfigError("what shall be halved? --current gpu=h100,bill=500000 says what runs today", param="halve")
    if current:
        if not arguments.halve and arguments.budget is None:
            raise ConfigError("what shall today's bill come down to? --halve, or --budget 250000", param="current")
        table = _priced(table, current)
    load = _load(arguments, config)
    case = _case(arguments, config, table, load, rate=_rate(arguments, config, table, load, current))
    gpus: list[str] = arguments.gpu.split(",") if arguments.gpu else []
    for name in gpus:
        find_gpu(table, name)
    formats = Formats(_weights(arguments.quant, config), kv_format(arguments.kv))
    first = gpus[0] if gpus else next(iter(table))
    given = {name: getattr(arguments, name) for name in ("tp", "pp", "ep", "sp")}
    wanted = Parallelism(**{name: size or 1 for name, size in given.items()})
    is_given = any(size is not None for size in given.values())
    checked = _checked(wanted, config, arguments.engine) if is_given else None
    setup = Setup(first, formats, checked)
    bill = _bill(arguments, current, config, table) if current else None
    return answer(case, setup, gpus=gpus, budget=arguments.budget, bill=bill)


def replica_for(arguments: argparse.Namespace) -> tuple[Case, Setup, Parallelism]:
    """One replica as `penstock sim predict` is told of it, of a demand that nobody has said anything of."""
    config, table = model_config(arguments.model), table_of(arguments)
    gpu = _one_way(arguments, find_gpu(table, arguments.gpu))
    if arguments.per_node is not None:
        check_count(arguments.per_node, 1)
        gpu = replace(gpu, per_node=arguments.per_node)
    formats = Formats(_weights(arguments.quant, config), kv_format(arguments.kv))
    if not gpu.supports(formats):
        raise ConfigError(_no_fp8(arguments.gpu), param="quant")
    parallelism = _checked(Parallelism(arguments.tp, arguments.pp, arguments.ep), config, arguments.engine)
    _check_step(arguments)
    case = Case(
        config,
        Demand(1.0, ((1, 1),), target=Target()),
        table | {arguments.gpu: gpu},
        max_num_seqs=arguments.max_num_seqs,
        chunk_tokens=arguments.chunk_tokens,
        engine=arguments.engine,
    )
    return case, Setup(arguments.gpu, formats, parallelism), parallelism


def _joined_alone(arguments: argparse.Namespace, gpu: Gpu) -> Gpu:
    if arguments.nodes is not None:
        raise ConfigError("--nodes is of --gpus: a plan says how many it takes", param="nodes")
    return _one_way(arguments, gpu)


def _one_way(arguments: argparse.Namespace, gpu: Gpu) -> Gpu:
    for name in ("link", "network"):
        if "," in (getattr(arguments, name) or ""):
            raise ConfigError(f"several of --{name} are for `penstock plan --gpus`; here it is one", param=name)
    return joined(gpu, arguments.link, arguments.network)[0]


def _no_fp8(gpu: str) -> str:
    return f"{gpu}: no fp8 there; choose bf16, int8 or int4 weights and a bf16 KV cache"


def _check_step(arguments: argparse.Namespace) -> None:
    for name in ("max_num_seqs", "chunk_tokens"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be 1 at least", param=name)


def _case(arguments: argparse.Namespace, config: ModelConfig, table: Table, load: Load, *, rate: float) -> Case:
    _check_step(arguments)
    if arguments.spare < 0:
        raise ConfigError("--spare cannot be negative", param="spare")
    longest = max(prompt + output for prompt, output in load.lengths)
    if longest > config.context_length:
        raise ConfigError(
            f"requests of up to {longest:,} tokens do not fit the model's context of {config.context_length:,}",
            param="prompt",
        )
    target = Target(arguments.ttft, arguments.tpot, arguments.percentile / 100)
    demand = Demand(rate, tuple(load.lengths), load.prefix_share, target)
    return Case(
        config,
        demand,
        table,
        max_num_seqs=arguments.max_num_seqs,
        chunk_tokens=arguments.chunk_tokens,
        engine=arguments.engine,
        num_spare=arguments.spare,
    )


def _load(arguments: argparse.Namespace, config: ModelConfig) -> Load:
    share: float | None = arguments.prefix_share
    if not arguments.trace:
        return Load(sampled(Lengths.parse(arguments.prompt), Lengths.parse(arguments.output)), share or 0.0)
    arrivals = read_trace(arguments.trace)
    most = config.context_length
    fitting = [one for one in arrivals if one.prompt_tokens + one.output_tokens <= most]
    if not fitting:
        raise ConfigError(f"no request of {arguments.trace} fits the model's context of {most:,}", param="trace")
    if num_left_out := len(arrivals) - len(fitting):
        said = f"left out: {num_left_out:,} of {len(arrivals):,} requests, longer than the model's context of {most:,}"
        print(said, file=sys.stderr)
    seconds = arrivals[-1].at_s
    return Load(
        [(one.prompt_tokens, one.output_tokens) for one in fitting],
        shared_by(fitting) if share is None else share,
        len(fitting) / seconds if seconds > 0 else None,
    )


def sampled(prompt: Lengths, output: Lengths) -> list[tuple[int, int]]:
    """Lengths at even steps of each distribution, so that their means are its own; paired at random."""
    if prompt.kind == output.kind == "fixed":
        return [(prompt.at(0.5), output.at(0.5))]
    shares = [(number + 0.5) / SAMPLE for number in range(SAMPLE)]
    shuffled = random.Random(0).sample(shares, SAMPLE)
    return [(prompt.at(one), output.at(other)) for one, other in zip(shares, shuffled, strict=True)]


def shared_by(arrivals: Sequence[Arrival]) -> float:
    """Returns the share of prompt tokens that an earlier prompt began with: what a cache that forgets nothing hits."""
    seen: set[int] = set()
    hit = 0
    for one in arrivals:
        whole = one.whole_blocks
        hit += next((i for i, block in enumerate(whole) if block not in seen), len(whole))
        seen.update(whole)
    return hit * BLOCK_TOKENS / sum(one.prompt_tokens for one in arrivals)


def _rate(
    arguments: argparse.Namespace, config: ModelConfig, table: Table, load: Load, current: Current | None
) -> float:
    if arguments.rate is not None:
        return float(arguments.rate)
    if load.rate is not None:
        return load.rate
    if arguments.trace:
        raise ConfigError("the trace has no duration: say --rate", param="rate")
    if current is None:
        raise ConfigError("how many requests a second? --rate 100, --trace FILE, or --current", param="rate")
    setup, num_gpus = _current_setup(current, config, table, arguments.engine), _num_gpus(current, table)
    judged = layouts(_case(arguments, config, table, load, rate=1.0), setup)
    carried = max((num_gpus // each.parallelism.num_ranks * each.rate_per_replica for each in judged), default=0.0)
    if not carried:
        raise ConfigError(
            f"{num_gpus:,} x {current.gpu} ({setup.formats}) do not carry a single request within the targets, by this "
            "model: say --rate, or what is different today",
            param="current",
        )
    return carried


def _priced(table: Table, current: Current) -> Table:
    """Returns the prices. With both a bill and a count, the price of that GPU is the user's own."""
    gpu = find_gpu(table, current.gpu)
    if current.bill is None or current.count is None:
        return table
    return table | {current.gpu: replace(gpu, price_per_hour=current.bill / current.count / HOURS_PER_MONTH)}


def _num_gpus(current: Current, table: Table) -> int:
    if current.count is not None:
        return current.count
    assert current.bill is not None
    return int(current.bill / (table[current.gpu].price_per_hour * HOURS_PER_MONTH))


def _bill(arguments: argparse.Namespace, current: Current, config: ModelConfig, table: Table) -> Bill:
    count, price = _num_gpus(current, table), table[current.gpu].price_per_hour
    cost = current.bill or count * price * HOURS_PER_MONTH
    goal = cost / 2 if arguments.halve else arguments.budget
    return Bill(
        "today", f"{count:,} x {current.gpu}", cost, goal, _current_setup(current, config, table, arguments.engine)
    )


def _current_setup(current: Current, config: ModelConfig, table: Table, engine: str) -> Setup:
    find_gpu(table, current.gpu)
    formats = Formats(_weights(current.quant, config), kv_format(current.kv))
    if not table[current.gpu].supports(formats):
        raise ConfigError(f"{current.gpu} has no fp8: say what quant and kv are today", param="current")
    parallelism = None
    if current.tp is not None or current.pp is not None:
        wanted = Parallelism(tp=current.tp or 1, pp=current.pp or 1)
        parallelism = _checked(wanted, config, engine)
    return Setup(current.gpu, formats, parallelism, current.uses_prefix_cache)


def _weights(name: str | None, config: ModelConfig) -> str:
    return weight_format(name) if name else config.quantization or "bfloat16"


def _checked(wanted: Parallelism, config: ModelConfig, engine: str) -> Parallelism:
    """Parallelism that a user gave, if a replica of this engine can have it. Experts that cannot be cut are shared
    out."""
    tp, pp, ep, sp = wanted.tp, wanted.pp, wanted.ep, wanted.sp
    if tp < 1:
        raise ConfigError(f"--tp {tp} must be 1 at least", param="tp")
    if not 1 <= pp <= config.num_layers:
        raise ConfigError(f"{config.num_layers} layers cannot be split into --pp {pp} stages", param="pp")
    if ep != 1 and (config.experts is None or ep != tp):
        reason = "the model is no mixture of experts" if config.experts is None else f"it must be 1, or --tp {tp}"
        raise ConfigError(f"--ep {ep}: {reason}", param="ep")
    if sp != 1 and (engine != "penstock" or sp < 1):
        raise ConfigError(f"--sp {sp}: ranks that share out tokens are planned for --engine penstock", param="sp")
    if engine == "penstock":
        if ep == 1:
            wanted = replace(splits_over(config, tp, sp=sp if sp > 1 else None) or wanted, pp=pp)
        if (obstacle := told_obstacle(config, wanted)) is not None:
            raise ConfigError(obstacle, param="tp")
    elif config.num_heads % tp:
        raise ConfigError(f"{config.num_heads} heads cannot be split over --tp {tp}", param="tp")
    return wanted


def _bill_of(text: str) -> float:
    try:
        return money(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"bill: {error}", param="current") from None


def _count(text: str, name: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(f"{name}={text} is not a count", param="current")
    return int(text)
