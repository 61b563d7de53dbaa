"""An engine process over the fake runner, spoken to like the real one, that misbehaves on request.

`launcher` starts it from a test. Tests start hundreds of them, and each would spend a tenth of a second on its imports:
so `python fake_engine.py FD` is a fork server that has imported what an engine needs, one for each process of pytest.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import time
import traceback
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

import msgspec

from penstock.core.clock import MonotonicClock
from penstock.core.errors import EngineUnavailable, ModelCorrupt
from penstock.core.measurements import ServingLimits
from penstock.core.model_config import VisionConfig
from penstock.core.parking import MemoryChange
from penstock.engine.embedding import EmbedQueue
from penstock.engine.engine import Engine
from penstock.engine.fake import FakeRunner, fake_logprobs, nearest
from penstock.engine.fake_embedder import FakeEmbedder
from penstock.engine.loop import EngineLoop
from penstock.engine.lora import LoraManager
from penstock.engine.mailbox import Mailbox
from penstock.engine.messages import EngineInfo, Failed, Loading, Ready
from penstock.engine.ports import Guides
from penstock.kv.cache import KVCache
from penstock.sched.budget import StepBudget
from penstock.sched.images import ImageSlots
from penstock.sched.lora import AdapterSlots
from penstock.sched.plan import Sampled, Slice, StepHandle, StepPlan
from penstock.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from penstock.engine.client import Launch
    from tests.engine.forking import ForkedProcess

VOCAB_SIZE = 1000
EOS = 2
VISION = VisionConfig(
    "qwen2_5_vl", 8, 8, num_layers=1, num_heads=1, patch_size=4, merge_size=2, temporal_patch_size=2, window_size=8
)
POISON = 1_000_000  # a prompt with this token makes its step fail; no vocabulary has it


class Options(msgspec.Struct):
    step_s: float = 0.0  # how long a step takes
    virtual_step_s: float = 0.0  # how long a step takes by the engine's clock, which then knows of nothing else
    num_blocks: int = 512
    host_blocks: int = 0
    block_size: int = 4
    chunk_tokens: int = 64
    max_num_seqs: int = 64
    vocab_size: int = VOCAB_SIZE
    overlaps: bool = False
    routing_tokens: int = 0
    is_guided: bool = False  # with the small tokenizer's vocabulary
    special: tuple[str, ...] = ()  # special tokens that it has besides
    are_guides_quick: bool = True
    max_loras: int = 0
    max_cpu_loras: int = 4
    read_s: float = 0.0  # how long reading an adapter takes
    can_park: bool = True
    wake_fails: int = 0  # so many times, as where another process has the memory
    echoes: bool = False  # an answer is the prompt up to its first end of sequence: a test says what the model says
    image_tokens: int = 0  # of images of the encoder below; 0: it takes none
    start: Literal["ready", "failed", "rank lost", "exit", "hang"] = "ready"


def launcher(**options: object) -> Launch:
    """Starts engines with these `Options`."""
    encoded = msgspec.json.encode(Options(**options))  # type: ignore[arg-type]

    async def launch(theirs: socket.socket) -> ForkedProcess:
        from tests.engine.forking import fork_server

        return fork_server().fork(encoded, theirs)

    return launch  # type: ignore[return-value]


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


class StepClock:
    """Stands still but for the steps."""

    now_s = 0.0

    def now(self) -> float:
        return self.now_s


class EchoRunner(FakeRunner):
    """A model that says what stands in the prompt before its first end of sequence, one token at each place."""

    def _choose_all(self, context: list[int], planned: Slice) -> Sampled:
        assert planned.sample is not None
        self._state_after(planned.request_id, context[: planned.end], 0)
        said = [*context[: context.index(EOS)], EOS]
        found: list[int] = []
        for spec, draft in zip_longest((planned.sample, *planned.ahead), planned.drafts):
            assert spec is not None
            token_id = said[min(spec.position - spec.prompt_len, len(said) - 1)]
            found.append(token_id if spec.mask is None else nearest(token_id, spec.mask.bits()))
            if found[-1] != draft:
                break
        num_logprobs = planned.sample.params.num_logprobs
        if num_logprobs is None:
            return Sampled(found)
        return Sampled(found, [fake_logprobs(one, self._vocab_size, num_logprobs) for one in found])


class SlowRunner:
    """The fake runner at the speed of a device, with steps that fail."""

    def __init__(self, options: Options, virtual: StepClock) -> None:
        self.overlaps = options.overlaps
        self._step_s = options.step_s
        self._wake_fails = options.wake_fails
        self._virtual = virtual
        self._virtual_step_s = options.virtual_step_s
        self._runner = (EchoRunner if options.echoes else FakeRunner)(
            options.num_blocks,
            options.block_size,
            vocab_size=options.vocab_size,
            overlaps=options.overlaps,
            host_blocks=options.host_blocks,
        )

    def submit(self, plan: StepPlan) -> StepHandle:
        time.sleep(self._step_s)
        self._virtual.now_s += self._virtual_step_s
        if any(POISON in planned.token_ids for planned in plan.slices):
            raise RuntimeError("poison")
        return self._runner.submit(plan)

    def park(self) -> MemoryChange:
        return self._runner.park()

    def wake(self) -> MemoryChange:
        if self._wake_fails:
            self._wake_fails -= 1
            raise EngineUnavailable("the device has no room")
        return self._runner.wake()


def run(options: Options, ours: socket.socket) -> None:
    """The whole life of an engine."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    mailbox = Mailbox(ours)
    mailbox.send(Loading("weights", 1, 2))
    if options.start == "hang":
        time.sleep(60)
    if options.start == "failed":
        mailbox.send(Failed("model_unsupported", "no such family"))
    if options.start == "rank lost":
        mailbox.send(Failed("engine_failed", "rank 1 of the model is lost"))
    if options.start != "ready":
        sys.exit(1)
    cache = KVCache(
        options.num_blocks, options.block_size, routing_tokens=options.routing_tokens, host_blocks=options.host_blocks
    )
    budget = StepBudget(options.chunk_tokens, target_s=None, floor=options.block_size)
    slots = AdapterSlots(options.max_loras)
    images = ImageSlots(options.image_tokens, options.image_tokens) if options.image_tokens else None
    scheduler = Scheduler(cache, budget, max_num_seqs=options.max_num_seqs, adapters=slots, images=images)
    info = EngineInfo(
        startup_s={"engine": 0.01},
        startup_cpu_s={"engine": 0.01},
        device="fake",
        number_format="int",
        quant="none",
        kv_dtype="int",
        kernels="none",
        limits=ServingLimits(
            max_num_seqs=options.max_num_seqs,
            chunk_tokens=options.chunk_tokens,
            max_model_len=cache.capacity_tokens,
            block_size=options.block_size,
            kv_capacity_tokens=cache.capacity_tokens,
        ),
        kv_bytes=0,
        routing_tokens=options.routing_tokens,
        max_loras=options.max_loras,
        can_park=options.can_park,
        takes_images=options.image_tokens > 0,
        max_image_tokens=options.image_tokens,
    )
    guides = _guides(options) if options.is_guided else None
    mailbox.send(Ready(info))
    virtual = StepClock()
    runner = SlowRunner(options, virtual)
    engine = Engine(
        scheduler,
        runner,
        guides=guides,
        embeddings=EmbedQueue(FakeEmbedder(poison=POISON)),
        lora=LoraManager(FakeWeights(options), slots, max_host=options.max_cpu_loras),
        memory=runner if options.can_park else None,
        vision=VISION if options.image_tokens else None,
    )
    EngineLoop(engine, mailbox, virtual if options.virtual_step_s else MonotonicClock()).run()


def _guides(options: Options) -> Guides:
    from penstock.engine import guides
    from tests.text.walking import vocabulary

    # How quick a guide is decides in which pieces its forced tokens come, and a busy machine would decide it anew.
    return guides.Guides(vocabulary(options.special), quick_s=math.inf if options.are_guides_quick else 0.0)


def serve_forks(control: socket.socket) -> None:
    """Forks an engine for each message, which brings two descriptors: the engine's socket, and a pipe for its exit
    status. Ends with the test process."""
    exit_pipes: dict[int, int] = {}

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):  # another signal's call, inside this one, has had them all
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                process_id, status = found
                exit_pipe = exit_pipes.pop(process_id)
                with contextlib.suppress(BrokenPipeError):
                    os.write(exit_pipe, os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))
                os.close(exit_pipe)

    signal.signal(signal.SIGCHLD, reap)
    for stop_signal in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop_signal, signal.SIG_IGN)
    while True:
        encoded, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 2)
        if not encoded:
            return
        engine_socket, exit_pipe = descriptors
        options = msgspec.json.decode(encoded, type=Options)
        if options.is_guided:
            _load_guides(options.special)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        process_id = os.fork()
        if process_id == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            for descriptor in (control.detach(), exit_pipe, *exit_pipes.values()):
                os.close(descriptor)
            _run_and_exit(options, engine_socket)
        exit_pipes[process_id] = exit_pipe
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        os.close(engine_socket)
        control.sendall(process_id.to_bytes(4, "little"))


def _load_guides(special: tuple[str, ...]) -> None:
    """Loads guides before the fork: numpy and a vocabulary take longer than all the rest."""
    from penstock.engine import guides  # noqa: F401
    from tests.text.walking import vocabulary

    vocabulary(special)


def _run_and_exit(options: Options, engine_socket: int) -> NoReturn:
    status = 1
    try:
        run(options, socket.socket(fileno=engine_socket))
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))
    serve_forks(socket.socket(fileno=int(sys.argv[1])))
