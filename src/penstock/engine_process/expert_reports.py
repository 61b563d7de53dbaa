"""Reports of expert load to the server, every few seconds while tokens are routed: a thread beside the loop."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from penstock.core.expert_load import ExpertLoad
from penstock.engine.mailbox import Disconnected
from penstock.engine.messages import ExpertState
from penstock.engine.rebalancing import ExpertRanks

EVERY_S = 2.0


def report_experts(experts: ExpertRanks, send: Callable[[ExpertState], None]) -> None:
    """Starts a thread that reports the experts' load until the server is gone."""

    def run() -> None:
        last = ExpertLoad()
        with contextlib.suppress(Disconnected):  # the loop notices that the server is gone
            while True:
                load = experts.load()
                if load != last:
                    send(ExpertState(load))
                    last = load
                time.sleep(EVERY_S)

    threading.Thread(target=run, name="expert-load", daemon=True).start()
