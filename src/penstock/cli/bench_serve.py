"""`penstock bench serve` and `penstock bench saturation`: flags to what they mean, and where the report goes."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from typing import TYPE_CHECKING

from penstock.cli.bench_flags import KEY_VARIABLES
from penstock.core.errors import ConfigError
from penstock.core.files import check_outputs, write_file, write_json

if TYPE_CHECKING:
    from penstock.bench.serve import Asked, LoadShape, Report, Target


def bench_serve(arguments: argparse.Namespace) -> None:
    import uvloop

    from penstock.bench.board import Board
    from penstock.bench.objective import Objective
    from penstock.bench.serve import bench_serve as run

    check_outputs(arguments.json, arguments.html)
    report = uvloop.run(
        run(
            _target(arguments),
            _asked(arguments),
            _shapes(arguments),
            num_requests=arguments.requests,
            duration_s=arguments.duration,
            warm_up=arguments.warmup,
            objective=Objective.parse(arguments.slo) if arguments.slo else None,
            seed=arguments.seed or str(int(time.time())),
            command=_command(),
            board=Board() if arguments.quiet else Board.on_stderr(),
        )
    )
    _write(report, arguments)


def bench_saturation(arguments: argparse.Namespace) -> None:
    import uvloop

    from penstock.bench.board import Board
    from penstock.bench.objective import Objective
    from penstock.bench.saturation import bench_saturation as run
    from penstock.bench.serve import LoadShape

    check_outputs(arguments.json, arguments.html)
    report = uvloop.run(
        run(
            _target(arguments),
            _asked(arguments),
            by=arguments.by,
            goal=arguments.goal,
            start=arguments.start,
            precision=arguments.precision,
            seconds=arguments.seconds,
            shape=LoadShape(process=arguments.arrivals, burstiness=arguments.burstiness),
            objective=Objective.parse(arguments.slo),
            seed=arguments.seed or str(int(time.time())),
            command=_command(),
            board=Board() if arguments.quiet else Board.on_stderr(),
        )
    )
    _write(report, arguments)


def _write(report: Report, arguments: argparse.Namespace) -> None:
    from penstock.bench.page import page
    from penstock.bench.serve_text import as_text

    print(f"\n{as_text(report)}")
    if arguments.json:
        write_json(arguments.json, report)
    if arguments.html:
        write_file(arguments.html, page(report))


def _command() -> str:
    """Returns the command as it was typed, but for a key."""
    words = list(sys.argv[1:])
    for index, word in enumerate(words):
        if word == "--api-key" and index + 1 < len(words):
            words[index + 1] = "…"
        elif word.startswith("--api-key="):
            words[index] = "--api-key=…"
    return f"penstock {shlex.join(words)}"


def _target(arguments: argparse.Namespace) -> Target:
    from penstock.bench.serve import Target

    return Target(
        url=arguments.url,
        model=arguments.model,
        endpoint=arguments.endpoint,
        api_key=arguments.api_key or next(filter(None, map(os.environ.get, KEY_VARIABLES)), None),
        timeout_s=arguments.timeout,
        new_connections=arguments.new_connections,
        ignore_eos=not arguments.no_ignore_eos,
        fields=arguments.body,
        tokenizer=arguments.tokenizer,
        context=arguments.context,
    )


def _asked(arguments: argparse.Namespace) -> Asked:
    from penstock.bench.serve import Asked
    from penstock.workload.lengths import Lengths

    return Asked(
        prompt=Lengths.parse(arguments.prompt_tokens),
        output=Lengths.parse(arguments.output_tokens),
        turns=Lengths.parse(arguments.turns),
        think_s=arguments.think,
        shared_tokens=arguments.shared_prefix,
        num_prefixes=arguments.prefixes,
        trace=arguments.trace,
        own=arguments.prompts,
        speed=arguments.speed,
        first=arguments.first,
        count=arguments.count,
    )


def _shapes(arguments: argparse.Namespace) -> list[LoadShape]:
    from penstock.bench.serve import LoadShape

    if arguments.concurrency and arguments.rate:
        raise ConfigError("--concurrency is a closed loop and --rate an open one: give one of them", param="rate")
    if arguments.rate:
        return [
            LoadShape(rate=rate, process=arguments.arrivals, burstiness=arguments.burstiness) for rate in arguments.rate
        ]
    return [LoadShape(concurrency=number) for number in arguments.concurrency or []]
