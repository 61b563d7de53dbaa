"""An engine process over the fake runner, started and spoken to like the real one, that misbehaves on request.

`python fake_engine.py FD OPTIONS`; `launcher` starts it from a test. Tests start it hundreds of times, so it imports
what an engine needs, and the rest where it is used.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from penstock.core.clock import MonotonicClock
from penstock.core.errors import ModelCorrupt
from penstock.engine.adapters import AdapterMail
from penstock.engine.embedding import EmbedQueue
from penstock.engine.fake import FakeRunner
from penstock.engine.fake_embedder import FakeEmbedder
from penstock.engine.loop import EngineLoop
from penstock.engine.mailbox import Mailbox
from penstock.engine.messages import EngineInfo, Failed, Loading, Ready
from penstock.engine.ports import Guides
from penstock.kv.cache import KVCache
from penstock.sched.adapters import AdapterSlots
from penstock.sched.budget import StepBudget
from penstock.sched.plan import StepHandle, StepPlan
from penstock.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from asyncio.subprocess import Process

    from penstock.engine.client import Launch

VOCAB_SIZE = 1000
POISON = 1_000_000  # a prompt with this token makes its step fail; no vocabulary has it


class Options(msgspec.Struct):
    step_s: float = 0.0  # how long a step takes
    num_blocks: int = 512
    host_blocks: int = 0
    block_size: int = 4
    chunk_tokens: int = 64
    max_num_seqs: int = 64
    vocab_size: int = VOCAB_SIZE
    overlaps: bool = False
    routing_tokens: int = 0
    is_guided: bool = False  # with the small tokenizer's vocabulary
    max_loras: int = 0
    max_cpu_loras: int = 4
    read_s: float = 0.0  # how long reading an adapter takes
    start: Literal["ready", "failed", "exit", "hang"] = "ready"


def launcher(**options: object) -> Launch:
    encoded = msgspec.json.encode(Options(**options)).decode()  # type: ignore[arg-type]

    async def launch(theirs: socket.socket) -> Process:
        from asyncio import create_subprocess_exec

        arguments = [__file__, str(theirs.fileno()), encoded]
        return await create_subprocess_exec(sys.executable, *arguments, pass_fds=[theirs.fileno()])

    return launch


class FakeWeights:
    """Adapters are read, and that is all."""

    def __init__(self, options: Options) -> None:
        self._read_s = options.read_s

    def read(self, path: str, digest: str) -> str:
        from penstock.hub.peft import read_peft

        time.sleep(self._read_s)
        if read_peft(Path(path)).digest != digest:
            raise ModelCorrupt(f"the adapter {path} is no longer the one that was loaded")
        return digest

    def keep(self, adapter: str) -> None:
        pass

    def forget(self, digest: str) -> None:
        pass

    def clear(self, slot: int) -> None:
        pass


class SlowRunner:
    """The fake runner at the speed of a device, with steps that fail."""

    def __init__(self, options: Options) -> None:
        self.overlaps = options.overlaps
        self._step_s = options.step_s
        self._runner = FakeRunner(
            options.num_blocks,
            options.block_size,
            vocab_size=options.vocab_size,
            overlaps=options.overlaps,
            host_blocks=options.host_blocks,
        )

    def submit(self, plan: StepPlan) -> StepHandle:
        time.sleep(self._step_s)
        if any(POISON in planned.token_ids for planned in plan.slices):
            raise RuntimeError("poison")
        return self._runner.submit(plan)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    options = msgspec.json.decode(sys.argv[2], type=Options)
    mailbox = Mailbox(socket.socket(fileno=int(sys.argv[1])))
    mailbox.send(Loading("weights", 1, 2))
    if options.start == "hang":
        time.sleep(60)
    if options.start == "failed":
        mailbox.send(Failed("model_unsupported", "no such family"))
    if options.start != "ready":
        sys.exit(1)
    cache = KVCache(
        options.num_blocks, options.block_size, routing_tokens=options.routing_tokens, host_blocks=options.host_blocks
    )
    budget = StepBudget(options.chunk_tokens, target_s=None, floor=options.block_size)
    slots = AdapterSlots(options.max_loras)
    scheduler = Scheduler(cache, budget, max_num_seqs=options.max_num_seqs, adapters=slots)
    info = EngineInfo(
        device="fake",
        number_format="int",
        quant="none",
        kv_dtype="int",
        kernels="none",
        num_blocks=options.num_blocks,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        chunk_tokens=options.chunk_tokens,
        max_model_len=cache.capacity_tokens,
        kv_bytes=0,
        routing_tokens=options.routing_tokens,
        max_loras=options.max_loras,
    )
    guides = _guides() if options.is_guided else None
    mailbox.send(Ready(info))
    embeddings = EmbedQueue(FakeEmbedder(poison=POISON), MonotonicClock())
    mail = AdapterMail(mailbox, FakeWeights(options), slots, max_host=options.max_cpu_loras)
    EngineLoop(scheduler, SlowRunner(options), mail, MonotonicClock(), guides=guides, embeddings=embeddings).run()


def _guides() -> Guides:
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))
    from penstock.engine import guides
    from tests.text.walking import vocabulary

    return guides.Guides(vocabulary())


if __name__ == "__main__":
    main()
