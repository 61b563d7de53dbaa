"""`python -m tools.cost [--model smollm2 | --shape llama8b]`: what the accounts cost, whether they add up, and how near
the weights by which a step is split are to what steps really take.

1. the time that splitting a step of 256 takes on the engine's thread, beside the sums that it made unnecessary;
2. a mix of requests on the real engine: what they are charged, all together, over the time that the device worked;
3. decode steps of several batch sizes and contexts: seconds for a token and for a token of context by least squares,
   and their ratio beside the one that the split uses.
"""

from __future__ import annotations

import argparse
import random
import timeit
from dataclasses import dataclass, field

import numpy as np

from penstock.bench.offline import OfflineMailbox
from penstock.bench.shapes import shape
from penstock.cli.bench_engine import make_scheduler
from penstock.core.clock import MonotonicClock
from penstock.core.model_config import ModelConfig
from penstock.core.request import Request, TokenEvent
from penstock.core.sampling import SamplingParams
from penstock.core.settings import EngineSettings
from penstock.engine.accounts import Accounts, Meter
from penstock.engine.engine import Engine
from penstock.engine.loop import EngineLoop
from penstock.engine.messages import FromEngine, StepReport
from penstock.engine_process.facts import peaks_of, work_of
from penstock.hub.checkpoint import Checkpoint
from penstock.hub.resolve import resolve
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner.assemble import Assembly, assemble
from penstock.sched.cost import Work, split
from penstock.sched.plan import SampleSpec, Slice, StepPlan

GREEDY = SamplingParams(temperature=0.0)
BATCHES, CONTEXTS, FIT_TOKENS = (1, 4, 16), (16, 512, 1024), 24
STEP_S, STEP_SEQUENCES = 2e-3, 256


@dataclass
class Office(OfflineMailbox):
    """The other end of the engine's mailbox, with accounts."""

    accounts: Accounts = field(default_factory=Accounts)

    def send(self, message: FromEngine) -> None:
        super().send(message)
        assert isinstance(message, StepReport)
        self.accounts.take(message)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.cost", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--shape", help="random weights of this shape instead, as in `penstock bench engine`")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    _time_split()
    checkpoint: Checkpoint
    checkpoint = RandomCheckpoint(shape(arguments.shape)) if arguments.shape else resolve(arguments.model)
    assembly = assemble(checkpoint, EngineSettings(threads=arguments.threads), lambda *_: None)
    kv_token_bytes = assembly.size.kv_bytes // (assembly.size.num_blocks * assembly.limits.block_size)
    work = work_of(checkpoint.config, assembly.device.name, kv_token_bytes, peaks_of(assembly.device.driver_name))
    _add_up(assembly, checkpoint.config, work)
    _fit(assembly, checkpoint.config, work)


def _time_split() -> None:
    spec, work = SampleSpec(GREEDY, [], 1, 1), Work(1e9, 1e8, 1e5, 1e5)
    decodes = [Slice(f"request-{i}", 500 + i, 1, [0], [0] * 40, spec, 0) for i in range(STEP_SEQUENCES)]
    mixed = [*decodes[1:], Slice("prompt", 0, 100, [0] * 100, [0] * 7, spec, 0)]
    events = [TokenEvent(part.request_id, [7]) for part in decodes]
    mixed_events = [TokenEvent(part.request_id, [7]) for part in mixed]
    plan = StepPlan(decodes)
    cases = {
        "the sums of before": lambda: (plan.num_tokens, plan.num_tokens, sum(s.num_tokens == 1 for s in plan.slices)),
        "all decode": lambda: split(decodes, events, STEP_S, work),
        "one is a prompt": lambda: split(mixed, mixed_events, STEP_S, work),
        "one had ended": lambda: split(decodes, events[1:], STEP_S, work),
    }
    print(f"a step of {STEP_SEQUENCES} sequences:")
    for name, case in cases.items():
        seconds = min(timeit.repeat(case, number=200, repeat=20)) / 200
        print(f"  {name:20} {1e6 * seconds:5.1f} us, {seconds / STEP_S:.2%} of {1e3 * STEP_S:.0f} ms")


def _run(assembly: Assembly, requests: list[Request], work: Work) -> tuple[list[StepReport], dict[str, Meter]]:
    office = Office(list(requests))
    office.accounts.begin(work, assembly.limits.block_size)
    meters = {request.id: Meter() for request in requests}
    for request in requests:
        office.accounts.open(request, meters[request.id])
    EngineLoop(Engine(make_scheduler(assembly), assembly.runner, work), office, MonotonicClock()).run()
    return office.reports, meters


def _add_up(assembly: Assembly, config: ModelConfig, work: Work) -> None:
    source = random.Random(1)
    shared = source.choices(range(config.vocab_size), k=200)
    requests = []
    for i in range(24):
        own = source.choices(range(config.vocab_size), k=source.randint(5, 150))
        prompt = shared + own if i % 2 else own
        requests.append(Request(f"r{i}", prompt, source.randint(2, 60), GREEDY, stop_token_ids=[source.randint(0, 99)]))
    reports, meters = _run(assembly, requests, work)
    charged_s = sum(meter.cost.device_s for meter in meters.values())
    busy_s = reports[-1].measured.totals.busy_s
    print(f"{len(requests)} requests: charged {charged_s:.4f} s of {busy_s:.4f} s busy, {charged_s / busy_s - 1:+.6%}")


def _fit(assembly: Assembly, config: ModelConfig, work: Work) -> None:
    source, rows = random.Random(2), []
    for batch in BATCHES:
        for context in CONTEXTS:
            requests = [
                Request(f"{batch}-{context}-{i}", source.choices(range(config.vocab_size), k=context), 99, GREEDY)
                for i in range(batch)
            ]
            reports, _ = _run(assembly, requests, work)
            steps = [one.step.cost_s for one in reports if one.step.num_tokens == one.step.num_sequences == batch]
            if len(steps) > FIT_TOKENS:
                rows.append((1.0, batch, batch * (context + 50), float(np.quantile(steps, 0.2))))
                print(f"  {batch:3} decodes of {context:5} tokens: {1e3 * rows[-1][3]:7.3f} ms")
    table = np.array(rows)
    (fixed_s, token_s, context_s), *_ = np.linalg.lstsq(table[:, :3] / table[:, 3:], np.ones(len(table)), rcond=None)
    used = (work.read + work.pair) / (work.token + work.choice)
    print(
        f"fixed {1e3 * fixed_s:.2f} ms, a decode {1e6 * token_s:.1f} us, a token of context {1e9 * context_s:.0f} ns: "
        f"1 to {context_s / token_s:.2e}; the split takes 1 to {used:.2e}"
    )


if __name__ == "__main__":
    main()
