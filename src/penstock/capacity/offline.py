"""The steps of a workload whose requests are all there from the start, as a continuously batching engine takes them.

Decodes first, then prompts in the order they came, in chunks, under one token budget; where the KV cache is full the
youngest gives way and is computed again later. It knows tokens, no seconds: `step_cost` prices what it yields.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.capacity.model_bytes import pairs
from penstock.capacity.step_cost import StepCost

Step = tuple[int, int, int, int]  # the arguments of StepCost.seconds


@dataclass
class _Sequence:
    start: int  # of the prompt, what is in the cache or computed
    length: int  # tokens known: its prompt, and what it has generated
    left: int  # tokens still to be generated


@dataclass(frozen=True)
class EngineLimits:
    max_num_seqs: int
    chunk_tokens: int  # most tokens in a step
    kv_tokens: int
    reads_shared_once: bool = False  # per step, for all its decodes; else each reads it for itself


def steps(lengths: Sequence[tuple[int, int]], shared: int, limits: EngineLimits) -> Iterator[Step]:
    """`lengths`: (prompt, output) of each request; `shared`: tokens that all prompts begin with, computed once."""
    waiting = deque(_Sequence(shared if i else 0, prompt, output) for i, (prompt, output) in enumerate(lengths))
    running: list[_Sequence] = []  # oldest first; those that decode
    while waiting or running:
        held = shared + sum(each.length - shared for each in running)
        while held + len(running) > limits.kv_tokens and len(running) > 1:
            victim = running.pop()
            held -= victim.length - shared
            victim.start = shared
            waiting.appendleft(victim)
        num_decodes, context = len(running), sum(each.length for each in running)
        if limits.reads_shared_once and num_decodes:
            context -= shared * (num_decodes - 1)
        tokens, looked_at, begun = _prefill(waiting, limits, num_decodes, limits.kv_tokens - held - num_decodes, shared)
        yield tokens, looked_at, num_decodes, context
        running += begun  # what is begun ends its prompt with a token too
        for each in running:
            each.length += 1
            each.left -= 1
        running = [each for each in running if each.left > 0]


def _prefill(
    waiting: deque[_Sequence], limits: EngineLimits, num_decodes: int, free: int, shared: int
) -> tuple[int, int, list[_Sequence]]:
    """Tokens, pairs, and those whose prompts are complete with them."""
    tokens = looked_at = 0
    done: list[_Sequence] = []
    while waiting and num_decodes + len(done) < limits.max_num_seqs:
        first = waiting[0]
        free -= first.length - min(first.start, shared)  # a prompt goes in where there is room for all of it
        take = min(first.length - first.start, limits.chunk_tokens - num_decodes - tokens)
        if take <= 0 or (free < 0 and num_decodes + len(done) > 0):
            break
        tokens += take
        looked_at += pairs(first.start, first.start + take)
        first.start += take
        if first.start < first.length:
            break
        done.append(waiting.popleft())
    return tokens, looked_at, done


def seconds(lengths: Sequence[tuple[int, int]], shared: int, limits: EngineLimits, cost: StepCost) -> float:
    return sum(cost.seconds(*step) for step in steps(lengths, shared, limits))
