"""The cost and the gain of speculation on a GPU, by shapes: `python -m tools.speculation_gpu`.

There are no trained weights, so how often guesses hold is imposed. The large model counts: its embeddings are so large,
and its head is so made, that token t is followed by t + 1, whatever the layers compute meanwhile, or, in the upper half
of the vocabulary, by the next in a circle of 32. So answers are known and are the same however they are computed; the
layers do all the work of a trained model. The small model counts too, and works for its guesses as any would; then each
is made wrong by a throw of dice, 1 - p of them. Real are: the time of everything, the engine's loop, its decisions
who gets how many guesses. Not real is that guesses fail independently of each other and of the text.

Prints what a step takes, in milliseconds, by sequences and tokens of each; what guesses of the small model take; and
output tokens per second while all decode, without speculation and with: with the small model by the chance p that a
guess holds, and with guesses from the text, which goes in circles or never repeats. Answers must be right.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import nan
from statistics import median

import torch
from torch import Tensor

from penstock.bench.offline import OfflineMailbox
from penstock.bench.shapes import shape
from penstock.core.clock import MonotonicClock
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.core.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.loop import EngineLoop
from penstock.hub.stored import Part
from penstock.kv.cache import KVCache
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner.assemble import Assembly, assemble
from penstock.sched.budget import StepBudget
from penstock.sched.plan import Runner, SampleSpec, Slice, StepPlan
from penstock.sched.scheduler import Scheduler
from penstock.sched.sequence import Sequence as LiveSequence
from penstock.sched.speculation.device_costs import DeviceCosts
from penstock.sched.speculation.draft_model import DraftModel
from penstock.sched.speculation.ngram import PromptLookup
from penstock.sched.speculation.speculation import Speculation

GREEDY = SamplingParams(temperature=0.0)
CONTEXT, PROMPT = 1024, 512  # tokens before a step that is timed alone; of a prompt
CIRCLE = 32
WARM_UP = 192  # tokens
SEQUENCES, TOKENS, GUESSES = (1, 8, 32), (1, 2, 3, 5, 9), (1, 2, 3, 4, 6)
_LOUD = 1000.0  # what embeddings are multiplied by: more than all layers add to them


class Counting(RandomCheckpoint):
    """A model that counts: after token t comes t + 1; in the upper half of the vocabulary, the next in its circle."""

    def draw(self, name: str, device: torch.device, part: Part | None = None) -> Tensor:
        assert part is None, "one rank has all of it"
        embeddings = "model.embed_tokens.weight"
        if name == "lm_head.weight":
            return super().draw(embeddings, device)[self._before(device)]
        return super().draw(name, device) * (_LOUD if name == embeddings else 1.0)

    def _before(self, device: torch.device) -> Tensor:
        token_ids = torch.arange(self.config.vocab_size, device=device)
        round_before = torch.where(token_ids % CIRCLE == 0, token_ids + CIRCLE - 1, token_ids - 1)
        before = torch.where(token_ids < self.config.vocab_size // 2, token_ids - 1, round_before)
        return before.clamp(0, self.config.vocab_size - 1)


def after(token_id: int, half: int) -> int:
    """Returns what a counting model says."""
    in_circle = token_id >= half and token_id % CIRCLE == CIRCLE - 1
    return token_id + 1 - (CIRCLE if in_circle else 0)


class Erring:
    """A model's guesses, some of them made wrong. The model is not told: it goes on as if it had guessed so."""

    is_steadfast = True

    def __init__(self, model: DraftModel, chance: float, vocab_size: int) -> None:
        self._model, self._chance, self._vocab_size = model, chance, vocab_size
        self._dice = random.Random(0)

    @property
    def is_settled(self) -> bool:
        return self._model.is_settled

    def look(self, sequence: LiveSequence) -> int | None:
        return self._model.look(sequence)

    def propose(self, wanted: Sequence[tuple[LiveSequence, int]]) -> list[list[int]]:
        proposed = [[self._perhaps(t) for t in made] for made in self._model.propose(wanted)]
        for (sequence, _), made in zip(wanted, proposed, strict=True):
            self._model._seen[sequence].guesses = made[:-1]
        return proposed

    def _perhaps(self, token_id: int) -> int:
        return token_id if self._dice.random() < self._chance else (token_id + 7) % self._vocab_size


@dataclass(frozen=True)
class Run:
    tokens_per_s: float
    drafted: int
    accepted: int
    steps: int

    def __str__(self) -> str:
        held = f"{self.accepted / self.drafted:4.0%} held" if self.drafted else "         "
        return f"{self.tokens_per_s:8,.0f} tok/s {held} {self.drafted / self.steps:5.1f} drafts/step"


class Bench:
    def __init__(self, large: str, small: str, quant: str, memory_fraction: float | None = None) -> None:
        self.settings = EngineSettings(
            speculate="draft",
            draft=small,
            quant=quant,  # type: ignore[arg-type]
            max_num_seqs=32,
            max_loras=0,
            memory_fraction=memory_fraction,
            load="dummy",
        )
        began_s = time.monotonic()
        config, other = (replace(shape(name), tied_embeddings=False) for name in (large, small))
        made = assemble(Counting(config), self.settings, lambda *_: None, Counting(other))
        self.assembly: Assembly = made
        self.cache = KVCache(made.size.num_blocks, made.limits.block_size, share_prefixes=False)
        self.vocab_size = config.vocab_size
        self.costs = {
            kind: DeviceCosts(made.limits.most_rows) for kind in ("draft", "ngram")
        }  # of a server that is up for long
        formats = made.formats
        print(
            f"{large} ({formats.quant if formats.quant != 'none' else formats.number_format}) and {small} on "
            f"{made.device.driver_name}: {made.size.num_blocks * made.limits.block_size:,} tokens of cache, ready in "
            f"{time.monotonic() - began_s:.1f} s",
            flush=True,
        )

    def small_model(self, chance: float) -> Speculation:
        made = self.assembly
        assert made.draft is not None
        model = DraftModel(
            made.draft.runner,
            self.cache.pool,
            context_length=made.draft.context_length,
            chunk_tokens=made.limits.chunk_tokens,
            reserve=made.limits.max_num_seqs,
        )
        return Speculation(Erring(model, chance, self.vocab_size), 6, self.costs["draft"])

    def ngram(self) -> Speculation:
        return Speculation(PromptLookup(), 16, self.costs["ngram"])

    def run(
        self, speculation: Speculation | None, concurrency: int, num_tokens: int, seed: int, *, circles: bool = False
    ) -> Run:
        dice, half = random.Random(seed), self.vocab_size // 2
        tokens = range(half, self.vocab_size) if circles else range(half - num_tokens - 8)
        prompts = [dice.choices(tokens, k=PROMPT) for _ in range(concurrency)]
        mailbox = OfflineMailbox([Request(f"{i}", p, num_tokens, GREEDY) for i, p in enumerate(prompts)])
        budget = StepBudget(self.assembly.limits.chunk_tokens, target_s=None, floor=self.assembly.limits.block_size)
        scheduler = Scheduler(self.cache, budget, max_num_seqs=self.assembly.limits.max_num_seqs)
        clock = MonotonicClock()
        EngineLoop(Engine(scheduler, self.assembly.runner, speculation=speculation), mailbox, clock).run()
        said = {f"{i}": prompt[-1:] for i, prompt in enumerate(prompts)}
        for event in mailbox.events:
            said[event.request_id] += event.token_ids
        for answer in said.values():
            assert all(b == after(a, half) for a, b in pairwise(answer)), "an answer is wrong"
        # From the step after the last with a prompt in it to the last in which all decode: others end earlier.
        measured = [report.measured for report in mailbox.reports]
        ended = min(i for i, m in enumerate(measured) if m.load.num_running < concurrency and m.totals.generated_tokens)
        decodes = [
            report.measured.totals
            for report in mailbox.reports[:ended]
            if 0 < report.step.num_tokens <= concurrency + report.step.num_drafts
        ]
        made = decodes[-1].generated_tokens - decodes[0].generated_tokens
        counters = scheduler.counters
        return Run(
            made / (decodes[-1].busy_s - decodes[0].busy_s),
            counters.drafted_tokens,
            counters.accepted_tokens,
            len(decodes),
        )


# -- steps -----------------------------------------------------------------------------------------------------------


def rows_step(sequences: int, tokens: int, block_size: int) -> StepPlan:
    spec = SampleSpec(GREEDY, history=[0], prompt_len=1, position=CONTEXT)
    blocks = -(-(CONTEXT + tokens) // block_size)
    return StepPlan(
        [
            Slice(
                f"{i}",
                CONTEXT,
                tokens,
                list(range(tokens)),
                range(i * blocks, (i + 1) * blocks),
                spec,
                0,
                ahead=[spec] * (tokens - 1),
            )
            for i in range(sequences)
        ]
    )


def guess_steps(sequences: int, count: int, block_size: int) -> Iterator[StepPlan]:
    """Yields steps as `DraftModel` submits them: the first with what it has not seen, two tokens, then one by one."""
    spec = SampleSpec(GREEDY, history=[0], prompt_len=1, position=CONTEXT)
    blocks = -(-(CONTEXT + count + 2) // block_size)
    for number in range(count):
        yield StepPlan(
            [
                Slice(
                    f"{i}",
                    CONTEXT + number + (number > 0),
                    1 + (number == 0),
                    [1, 2] if number == 0 else [],
                    range(i * blocks, (i + 1) * blocks),
                    spec,
                    0,
                )
                for i in range(sequences)
            ]
        )


def seconds_of(runner: Runner, plans: list[StepPlan], rounds: int = 15) -> float:
    """All submitted, then all read."""
    times = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        for handle in [runner.submit(plan) for plan in plans]:
            handle.result()
        times.append(time.perf_counter() - began_s)
    return median(times[3:])


def costs(bench: Bench) -> None:
    made = bench.assembly
    assert made.draft is not None
    print(f"\na step, ms, with the host's part; {CONTEXT} tokens before")
    print("sequences   tokens of each:" + "".join(f" {tokens:6}" for tokens in TOKENS))
    for sequences in SEQUENCES:
        told = [
            1e3 * seconds_of(made.runner, [rows_step(sequences, tokens, made.limits.block_size)])
            if sequences * tokens <= made.limits.most_rows
            else nan
            for tokens in TOKENS
        ]
        print(f"{sequences:9} {'':17}" + "".join(f" {ms:6.2f}" for ms in told), flush=True)
    print("\nguesses of the small model, ms\nsequences          guesses:" + "".join(f" {n:6}" for n in GUESSES))
    for sequences in SEQUENCES:
        told = [
            1e3 * seconds_of(made.draft.runner, list(guess_steps(sequences, count, made.limits.block_size)))
            for count in GUESSES
        ]
        print(f"{sequences:9} {'':17}" + "".join(f" {ms:6.2f}" for ms in told), flush=True)


def answers(bench: Bench, chances: list[float], concurrency: int, num_tokens: int) -> None:
    bench.run(None, concurrency, 16, 0)
    plain = bench.run(None, concurrency, num_tokens, 1).tokens_per_s
    print(f"\n{concurrency} at once: {plain:,.0f} tok/s without", flush=True)

    def tell(name: str, speculation: Speculation, *, circles: bool = False) -> None:
        bench.run(speculation, concurrency, WARM_UP, 2, circles=circles)  # it learns how often guesses hold
        found = bench.run(speculation, concurrency, num_tokens, 3, circles=circles)
        print(f"  {name:14} {found}  {found.tokens_per_s / plain:5.2f}x", flush=True)

    for chance in chances:
        tell(f"p = {chance:.1f}", bench.small_model(chance))
    tell("ngram, circles", bench.ngram(), circles=True)
    tell("ngram, never", bench.ngram())
    for kind, known in bench.costs.items():
        wait, deeper, row = known._shares(concurrency)
        print(f"  {kind}: of a step, waiting {wait:.0%}, a guess {deeper:.1%}, a row of each {row:.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", default="llama8b")
    parser.add_argument("--small", default="llama1b")
    parser.add_argument("--quant", default="none", choices=["none", "fp8"])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--chances", default="0,0.3,0.5,0.7,0.8,0.9")
    parser.add_argument("--concurrency", default="1,8,32")
    args = parser.parse_args()
    bench = Bench(args.large, args.small, args.quant)
    costs(bench)
    for concurrency in map(int, args.concurrency.split(",")):
        answers(bench, [float(p) for p in args.chances.split(",")], concurrency, args.tokens)


if __name__ == "__main__":
    main()
