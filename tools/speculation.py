"""The gain of speculation, and its cost where it brings nothing: `python -m tools.speculation`.

The engine in process, with and without speculation by turns, so that what else the machine does hits both alike; who
goes first changes every round. Answers are compared, and must be equal. Prints for every kind of text and concurrency
the time per output token without and with, their ratio (the median over the rounds' ratios, and the middle half of
them), how many drafts held, and how many tokens a sequence got per step.

With --cpu-time everything runs on one thread and by the time that this process had a core, here and in the engine's own
decisions: on a machine where others work that is nearer to the truth than the wall's clock.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from statistics import median, quantiles

from penstock.bench.offline import OfflineMailbox
from penstock.core.clock import Clock, MonotonicClock
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.core.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.loop import EngineLoop
from penstock.engine_process.speculation import draft_checkpoint, make_speculation
from penstock.hub.checkpoint import Checkpoint
from penstock.hub.resolve import resolve
from penstock.kv.cache import KVCache
from penstock.runner.assemble import Assembly, assemble
from penstock.sched.budget import StepBudget
from penstock.sched.scheduler import Scheduler
from penstock.text.tokenizer import Tokenizer

CODE = """def total_price(items, tax_rate):
    total = 0
    for item in items:
        price = item["price"]
        quantity = item["quantity"]
        total = total + price * quantity
    return total * (1 + tax_rate)


def average_price(items):
    total = 0
    for item in items:
        total = total + item["price"]
    return total / len(items)


def cheapest(items):
    best = items[0]
    for item in items:
        if item["price"] < best["price"]:
            best = item
    return best
"""
ARTICLE = """The lighthouse at Gull Point was built in 1871 by the engineer Margaret Hale. It is forty metres tall and
stands on a reef two kilometres from the coast. Its lamp could be seen from thirty kilometres in clear weather. The
last keeper left the tower in 1962, when the lamp was made to work by itself. Today the lighthouse is a museum, and
twelve thousand people visit it every summer."""
KINDS: dict[str, str] = {
    "code edit": f"Rewrite this file with type annotations, and change nothing else:\n\n{CODE}",
    "quote": f"Quote every sentence of this text, and say of each what it means:\n\n{ARTICLE}",
    "story": "Write a long story about a sailor who finds a map in the library of a small town.",
}
TALE = "Once upon a time there was a little girl named Lily, who lived in house number {}. One day"


@dataclass(frozen=True)
class Case:
    kind: str
    concurrency: int
    temperature: float


CASES = [
    Case("code edit", 1, 0.0),
    Case("quote", 1, 0.0),
    Case("quote", 1, 0.7),
    Case("story", 1, 1.0),
    Case("tale", 1, 0.0),  # what stories15M knows to draft
    Case("tale", 1, 0.7),
    Case("quote", 8, 0.7),
    Case("quote", 32, 0.7),
    Case("story", 32, 1.0),
]


@dataclass(frozen=True)
class Run:
    seconds: float
    answers: dict[str, list[int]]
    drafted: int
    accepted: int

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.answers.values()))


class CpuClock:
    def now(self) -> float:
        return time.process_time()


class Bench:
    def __init__(self, model: str, settings: EngineSettings, tokens: int, clock: Clock) -> None:
        self.settings = settings
        self.clock = clock
        self.tokens = tokens
        self.checkpoint: Checkpoint = resolve(model)
        self.tokenizer = Tokenizer.load(self.checkpoint.tokenizer_source)
        source = self.checkpoint.tokenizer_source
        small = draft_checkpoint(self.checkpoint, source, settings)
        self.assembly: Assembly = assemble(self.checkpoint, settings, _silent, small)
        # One for all runs, since the device has one; and what one run computed must not help the next.
        self.cache = KVCache(self.assembly.size.num_blocks, self.assembly.limits.block_size, share_prefixes=False)
        self.speculation, self.name = make_speculation(settings, self.assembly, self.cache)
        assert self.speculation is not None, "there is nothing to measure"

    def requests(self, case: Case, turn: int) -> list[Request]:
        return [
            Request(
                f"{turn}-{number}",
                self._prompt(case.kind, f"{turn}.{number}"),
                self.tokens,
                sampling=SamplingParams(temperature=case.temperature, seed=100 * turn + number),
            )
            for number in range(case.concurrency)
        ]

    def _prompt(self, kind: str, number: str) -> list[int]:
        """No two are alike from their first words on."""
        if kind == "tale":
            return self.tokenizer.encode(TALE.format(number), add_special_tokens=True)
        chat = f"<|im_start|>user\n({number}) {KINDS[kind]}<|im_end|>\n<|im_start|>assistant\n"
        return self.tokenizer.encode(chat, add_special_tokens=False)

    def run(self, requests: list[Request], *, speculates: bool) -> Run:
        budget = StepBudget(self.assembly.limits.chunk_tokens, target_s=None, floor=self.assembly.limits.block_size)
        scheduler = Scheduler(self.cache, budget, max_num_seqs=self.assembly.limits.max_num_seqs)
        mailbox = OfflineMailbox(list(requests))
        engine = Engine(scheduler, self.assembly.runner, speculation=self.speculation if speculates else None)
        loop = EngineLoop(engine, mailbox, self.clock)
        began_s = self.clock.now()
        loop.run()
        seconds = self.clock.now() - began_s
        answers: dict[str, list[int]] = {request.id: [] for request in requests}
        for event in mailbox.events:
            answers[event.request_id] += event.token_ids
        return Run(seconds, answers, scheduler.counters.drafted_tokens, scheduler.counters.accepted_tokens)

    def measure(self, case: Case, rounds: int) -> None:
        pairs: list[tuple[Run, Run]] = []
        for turn in range(rounds + 1):
            requests = self.requests(case, turn)
            order = (False, True) if turn % 2 else (True, False)
            runs = {speculates: self.run(requests, speculates=speculates) for speculates in order}
            assert runs[False].answers == runs[True].answers, "an answer changed"
            if turn:  # the first is to warm up
                pairs.append((runs[False], runs[True]))
        ratios = [plain.seconds / other.seconds for plain, other in pairs]
        spread = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        plain_ms, other_ms = (
            1e3 * median(pair[index].seconds * case.concurrency / pair[index].num_tokens for pair in pairs)
            for index in (0, 1)
        )
        drafted, accepted = sum(run.drafted for _, run in pairs), sum(run.accepted for _, run in pairs)
        made = sum(run.num_tokens for _, run in pairs)
        held = f"{accepted / drafted:4.0%} of {drafted} drafts held" if drafted else "no drafts"
        print(
            f"{case.kind:10} x{case.concurrency:<3} t={case.temperature:<4} "
            f"{plain_ms:7.2f} -> {other_ms:7.2f} ms/token  "
            f"{median(ratios):5.2f}x ({spread[0]:.2f} to {spread[2]:.2f})  "
            f"{held}, {made / (made - accepted):.2f} tokens a step",
            flush=True,
        )


def _silent(name: str, done: int, total: int) -> None:
    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", help="a model to draft with, in place of the text itself")
    parser.add_argument("--draft-tokens", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cpu-time", action="store_true", help="of one thread, in place of the wall's clock")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", help="a kind of text: " + ", ".join([*KINDS, "tale"]))
    parser.add_argument("--concurrency", type=int)
    args = parser.parse_args()
    settings = replace(
        EngineSettings(),
        threads=1 if args.cpu_time else args.threads,
        speculate="draft" if args.draft else "ngram",
        draft=args.draft,
        draft_tokens=args.draft_tokens,
    )
    bench = Bench(args.model, settings, args.tokens, CpuClock() if args.cpu_time else MonotonicClock())
    print(f"{args.model}, speculation {bench.name}; {args.tokens} tokens, {args.rounds} rounds", flush=True)
    for case in CASES:
        if args.only in (None, case.kind) and args.concurrency in (None, case.concurrency):
            bench.measure(case, args.rounds)


if __name__ == "__main__":
    main()
