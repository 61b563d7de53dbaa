"""The process of a rank that follows: `python -m penstock.engine_process.rank SPEC`. Started by the engine's process.

SPEC is the JSON of `RankSpec`. It loads its part of the model and then runs what the leader sends, until that is gone.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys

import msgspec

from penstock.core.crash_stacks import write_stacks_on_crash
from penstock.core.errors import PenstockError
from penstock.core.model_config import ModelConfig
from penstock.core.ranks import RankLost
from penstock.link.parent_death import end_with_parent
from penstock.runner.ranks.messages import FailedToStart, Lost, RankSpec, to_follower_decoder

log = logging.getLogger("penstock.runner")

_BEATS = 6  # signs of life in the time after which it would be given up
_rank_spec_decoder = msgspec.json.Decoder(RankSpec)


def main() -> None:
    write_stacks_on_crash()
    spec = _rank_spec_decoder.decode(sys.argv[1])
    logging.basicConfig(level=logging.INFO, format=f"%(levelname)s %(name)s (rank {spec.rank}): %(message)s")
    for stop_signal in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the leader decides when we stop
        signal.signal(stop_signal, signal.SIG_IGN)
    from penstock.hub.checkpoint import Checkpoint
    from penstock.hub.encoder import EncoderCheckpoint
    from penstock.hub.resolve import resolve
    from penstock.link.connection import Connection, Disconnected
    from penstock.model.random_weights import RandomCheckpoint
    from penstock.runner.assemble import assemble
    from penstock.runner.ranks.follower import FollowerGroup
    from penstock.runner.ranks.join import join, store_at

    connection = Connection(socket.socket(fileno=spec.control), to_follower_decoder)
    try:
        checkpoint: Checkpoint
        if isinstance(spec.model, ModelConfig):
            checkpoint = RandomCheckpoint(spec.model)
        else:
            found = resolve(spec.model)
            assert not isinstance(found, EncoderCheckpoint)
            checkpoint = found
        store = store_at(spec.store)
        place = join(spec.engine, spec.parallelism, spec.nodes, spec.rank, spec.ways, store, checkpoint.config)
        group = FollowerGroup(place, connection)
        assembly = assemble(checkpoint, spec.engine, lambda name, done, total: None, group=group)
        group.serve(assembly, spec.engine.rank_timeout_s / _BEATS, lends=spec.engine.kv_port is not None)
    except PenstockError as error:
        with contextlib.suppress(Disconnected):  # the leader may have failed for the same reason, and be gone
            connection.send(FailedToStart(error.code, error.message))
        sys.exit(1)
    except Disconnected:
        sys.exit(0)
    except RankLost as lost:
        log.error("%s", lost)
        with contextlib.suppress(Disconnected):
            connection.send(Lost(lost.rank, lost.why))
        sys.exit(1)


if __name__ == "__main__":
    # It may be waiting in a collective that nobody else will come to. One that is forked has a lifeline instead.
    end_with_parent(signal.SIGKILL)
    main()
