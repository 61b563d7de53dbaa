"""Rounds: every server meets every workload once in each, with the same prompts, taking turns.

Machines drift. Servers that take turns drift together, so their ratio holds where their numbers do not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import uvloop

from penstock.bench.board import Board
from penstock.bench.client import Client
from penstock.bench.load import Load, Run
from penstock.bench.machine import busy_s, num_cores, tree_usage
from penstock.bench.measurement import Measurement, measurement
from penstock.bench.servers import Server
from penstock.bench.speech import Speech
from penstock.bench.workloads import WARM_UP, Prompts, Workload, make_prompts


def run_rounds(
    servers: Sequence[Server], workloads: Sequence[Workload], words: Sequence[str], *, num_rounds: int, seed: str
) -> Iterator[Measurement]:
    for server in servers:
        measure(server, WARM_UP, make_prompts(WARM_UP, words, seed), round_=0)
    for round_ in range(num_rounds):
        turn = round_ % len(servers)
        for workload in workloads:
            prompts = make_prompts(workload, words, f"{seed} {round_}")
            for server in [*servers[turn:], *servers[:turn]]:
                yield measure(server, workload, prompts, round_)


def measure(server: Server, workload: Workload, prompts: Sequence[str], round_: int) -> Measurement:
    client_before_s, foreign_before_s = time.process_time(), _foreign_s(server)
    run = uvloop.run(closed_loop(server.url, server.model, workload, prompts))
    client_after_s, foreign_after_s = time.process_time(), _foreign_s(server)
    available_s = run.wall_s * num_cores()
    foreign_cpu = None
    if foreign_before_s is not None and foreign_after_s is not None:
        foreign_cpu = max(0.0, (foreign_after_s - foreign_before_s) / available_s)
    client_cpu = (client_after_s - client_before_s) / available_s
    return measurement(server.name, workload.name, round_, run, client_cpu=client_cpu, foreign_cpu=foreign_cpu)


async def closed_loop(url: str, model: str, workload: Workload, prompts: Sequence[str]) -> Run:
    """A connection per request, as from many clients: some servers give a thread to each one that stays open."""
    client = Client(url, timeout_s=900.0, new_connections=True)
    source = Prompts(prompts, workload.output_tokens)
    try:
        load = Load(client, Speech(model, "completions"), Board())
        return await load.closed(source, concurrency=workload.concurrency, total=source.count)
    finally:
        client.close()


def _foreign_s(server: Server) -> float | None:
    """CPU seconds so far of everybody but the server and ourselves."""
    everybody_s = busy_s()
    if everybody_s is None or server.pid is None:
        return None
    return everybody_s - tree_usage(server.pid).cpu_s - time.process_time()
