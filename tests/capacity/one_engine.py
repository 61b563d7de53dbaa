"""An engine under Poisson arrivals, step by step, priced by StepCost: what the formulas of `steady` are held against.

First come, first served; all that decode are in every step, prompts fill the chunk. It shares no formula with `steady`.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from penstock.capacity.demand import Demand
from penstock.capacity.model_bytes import pairs
from penstock.capacity.steady import Limits
from penstock.capacity.step_cost import StepCost


@dataclass
class Served:
    arrived_s: float
    prompt: int
    left: int
    start: int
    first_s: float = 0.0
    last_s: float = 0.0
    output: int = 0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / (self.output - 1)


def serve(cost: StepCost, demand: Demand, limits: Limits, *, num_requests: int, seed: int = 0) -> list[Served]:
    source, arrives_s = random.Random(seed), 0.0
    coming: deque[Served] = deque()
    for _ in range(num_requests):
        arrives_s += source.expovariate(demand.rate)
        prompt, output = source.choice(demand.lengths)
        coming.append(Served(arrives_s, prompt, output, int(prompt * demand.prefix_share), output=output))
    waiting: deque[Served] = deque()
    running: list[Served] = []
    done: list[Served] = []
    now_s = 0.0
    while coming or waiting or running:
        while coming and coming[0].arrived_s <= now_s:
            waiting.append(coming.popleft())
        if not waiting and not running:
            now_s = coming[0].arrived_s
            continue
        tokens = looked_at = 0
        begun: list[Served] = []
        context = sum(each.prompt for each in running)
        while waiting and len(running) + len(begun) < limits.max_num_seqs and tokens < limits.chunk_tokens:
            first = waiting[0]
            take = min(first.prompt - first.start, limits.chunk_tokens - tokens)
            tokens, looked_at = tokens + take, looked_at + pairs(first.start, first.start + take)
            first.start += take
            if first.start == first.prompt:
                begun.append(waiting.popleft())
        now_s += cost.seconds(tokens, looked_at, len(running), context)
        for each in begun:
            each.first_s = now_s
        running += begun
        for each in running:
            each.prompt += 1
            each.left -= 1
            each.last_s = now_s
        done += [each for each in running if each.left == 0]
        running = [each for each in running if each.left > 0]
    return done
