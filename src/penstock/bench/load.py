"""The closed loop: so many clients, each sending its next request when its last one is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import aiohttp

from penstock.bench.client import Answer, Recording, RequestFailed, ask, digest, new_session, request_body
from penstock.bench.workloads import Workload


@dataclass(frozen=True)
class Outcome:
    wall_s: float
    answers: list[Answer]
    failures: list[str]  # one reason per request that has no answer


async def closed_loop(url: str, model: str, workload: Workload, prompts: Sequence[str]) -> Outcome:
    bodies = [request_body(model, workload, prompt) for prompt in prompts]
    queue = iter(bodies)  # shared: each client takes the next request there is
    async with new_session() as session:
        started_s = time.perf_counter()
        clients = [_client(session, url, queue) for _ in range(workload.concurrency)]
        recorded = [result for results in await asyncio.gather(*clients) for result in results]
        wall_s = time.perf_counter() - started_s
    answers = []
    failures = []
    for recording in recorded:
        try:
            if isinstance(recording, RequestFailed):
                raise recording
            answers.append(digest(recording))
        except RequestFailed as failure:
            failures.append(str(failure))
    return Outcome(wall_s, answers, failures)


async def _client(session: aiohttp.ClientSession, url: str, queue: Iterator[bytes]) -> list[Recording | RequestFailed]:
    results: list[Recording | RequestFailed] = []
    for body in queue:
        try:
            results.append(await ask(session, url, body))
        except RequestFailed as failure:
            results.append(failure)
    return results
