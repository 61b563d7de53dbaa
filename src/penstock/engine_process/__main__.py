"""The engine's process: `python -m penstock.engine_process FD SETTINGS`. Started by `serve`, never by hand.

FD is the server's socket; SETTINGS is the JSON of `Settings`. Events before the loop runs are told over the socket:
progress, then Ready or Failed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time

import msgspec

from penstock.core.crash_stacks import write_stacks_on_crash
from penstock.core.errors import EngineFailed, PenstockError
from penstock.core.ranks import RankLost
from penstock.core.settings import Settings
from penstock.engine.mailbox import Disconnected, Mailbox
from penstock.engine.messages import Failed, Ready
from penstock.engine_process.build import build
from penstock.link.parent_death import end_with_named_parent

log = logging.getLogger("penstock.engine")

_CAUSE_S = 1.0  # for the threads that watch the ranks: they can tell which one died from those that felt it
_settings_decoder = msgspec.json.Decoder(Settings)


def main() -> None:
    write_stacks_on_crash()
    end_with_named_parent()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    for stop_signal in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the server decides when we stop
        signal.signal(stop_signal, signal.SIG_IGN)
    descriptor, encoded = sys.argv[1:]
    mailbox = Mailbox(socket.socket(fileno=int(descriptor)))
    settings = _settings_decoder.decode(encoded)

    def on_lost(lost: RankLost) -> None:
        """Last words, so that whoever waits is told why; the server starts all ranks anew."""
        log.error("%s", lost)
        with contextlib.suppress(Disconnected):
            mailbox.send(Failed(EngineFailed.code, str(lost)))
        os._exit(1)

    try:
        loop, info = build(settings, mailbox, on_lost)
        mailbox.send(Ready(info))
    except PenstockError as error:
        mailbox.send(Failed(error.code, error.message))
        sys.exit(1)
    except RankLost as lost:
        mailbox.send(Failed(EngineFailed.code, str(lost)))
        sys.exit(1)
    except Disconnected:
        sys.exit(1)
    try:
        loop.run()
    except RankLost as lost:
        time.sleep(_CAUSE_S)
        on_lost(lost)


if __name__ == "__main__":
    main()
