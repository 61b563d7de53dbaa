"""The engine's process: `python -m penstock.cli.engine_process FD SETTINGS`. Started by `serve`, never by hand.

FD is the server's socket; SETTINGS is the JSON of `Settings`. Whatever happens before the loop runs is told over the
socket: progress, then Ready or Failed.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys

import msgspec

from penstock.cli.phases import Phases
from penstock.core.clock import MonotonicClock
from penstock.core.errors import PenstockError
from penstock.core.hashing import ROUTING_TOKENS
from penstock.core.settings import Settings
from penstock.engine.loop import EngineLoop
from penstock.engine.mailbox import Disconnected, Mailbox
from penstock.engine.messages import EngineInfo, Failed, Loading, Ready
from penstock.hub.checkpoint import Checkpoint
from penstock.kv.cache import KVCache
from penstock.sched.budget import StepBudget
from penstock.sched.scheduler import Scheduler


def build(settings: Settings, mailbox: Mailbox) -> tuple[EngineLoop, EngineInfo]:
    phases = Phases("import", lambda name, done, total: mailbox.send(Loading(name, done, total)))
    # Torch takes a second to import; the socket is already open, so the server knows we live.
    from penstock.hub.resolve import describe, resolve
    from penstock.model.random_weights import RandomCheckpoint
    from penstock.runner.assemble import assemble

    engine = settings.engine
    phases("files", 0, 0)
    checkpoint: Checkpoint
    if engine.load == "dummy":
        checkpoint = RandomCheckpoint(describe(settings.model).config)
    else:
        checkpoint = resolve(settings.model)
    assembly = assemble(checkpoint, engine, phases)
    phases.close()
    floor = max(assembly.block_size, assembly.chunk_tokens // 8)
    budget = StepBudget(assembly.chunk_tokens, target_s=settings.slo.tpot_s, floor=floor)
    cache = KVCache(
        assembly.num_blocks, assembly.block_size, share_prefixes=engine.prefix_cache, routing_tokens=ROUTING_TOKENS
    )
    scheduler = Scheduler(cache, budget, max_num_seqs=assembly.max_num_seqs, patience_s=settings.slo.ttft_s)
    info = EngineInfo(
        device=assembly.device,
        number_format=assembly.number_format,
        quant=assembly.quant,
        kv_dtype=assembly.kv_dtype,
        kernels=assembly.kernels,
        num_blocks=assembly.num_blocks,
        block_size=assembly.block_size,
        max_num_seqs=assembly.max_num_seqs,
        chunk_tokens=assembly.chunk_tokens,
        max_model_len=assembly.max_model_len,
        kv_bytes=assembly.kv_bytes,
        startup_s=phases.seconds,
        routing_tokens=cache.routing.size if cache.routing is not None else 0,
    )
    return EngineLoop(scheduler, assembly.runner, mailbox, MonotonicClock()), info


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    for stop_signal in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the server decides when we stop
        signal.signal(stop_signal, signal.SIG_IGN)
    descriptor, encoded = sys.argv[1:]
    mailbox = Mailbox(socket.socket(fileno=int(descriptor)))
    settings = msgspec.json.decode(encoded, type=Settings)
    try:
        loop, info = build(settings, mailbox)
        mailbox.send(Ready(info))
    except PenstockError as error:
        mailbox.send(Failed(error.code, error.message))
        sys.exit(1)
    except Disconnected:
        sys.exit(1)
    loop.run()


if __name__ == "__main__":
    main()
