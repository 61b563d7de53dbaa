"""One line per request, written by a thread: no request waits for whoever reads the log.

What is known of a request is kept as it is and becomes text in the thread, five times a second and many lines to a
write; a line costs the event loop an append. A log that nobody takes from loses lines, and counts them. Lines hold
ids, names of the operator's and numbers: no part of a prompt, an answer or a key.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.gateway.recorder import RequestFacts

log = logging.getLogger("penstock.gateway.request")

_INTERVAL_S = 0.2
_MAX_WAITING = 50_000  # lines
_BATCH = 100  # lines of one record: a third of a millisecond's work, after which the event loop's thread gets its turn


class RequestLog:
    """`append` belongs to the event loop. A record of the logger may hold several lines, each with its own time."""

    def __init__(self, logger: logging.Logger = log) -> None:
        self._logger = logger
        self._waiting: deque[tuple[float, RequestFacts]] = deque()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="request log", daemon=True)
        self.num_lost = 0

    def start(self) -> RequestLog:
        self._thread.start()
        return self

    def append(self, facts: RequestFacts) -> None:
        if len(self._waiting) < _MAX_WAITING:
            self._waiting.append((time.time(), facts))
        else:
            self.num_lost += 1

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._write()

    def _run(self) -> None:
        while not self._stopping.wait(_INTERVAL_S):
            self._write()

    def _write(self) -> None:
        is_wanted = self._logger.isEnabledFor(logging.INFO)
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
            if is_wanted:
                self._logger.info("\n".join([_line(at_s, facts) for at_s, facts in batch]))

    def __enter__(self) -> RequestLog:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _line(at_s: float, facts: RequestFacts) -> str:
    return (
        f"{_second(int(at_s))}.{int(at_s % 1 * 1000):03d}Z id={facts.id} "
        f"tenant={facts.tenant or '-'} key={facts.key_id or '-'} surface={facts.surface} model={facts.model or '-'} "
        f"replica={facts.replica or '-'} outcome={facts.ending.value} reason={facts.reason or '-'} "
        f"prompt={facts.input_tokens} cached={facts.cached_tokens} output={facts.output_tokens} "
        f"queue_ms={_ms(facts.queue_s)} ttft_ms={_ms(facts.ttft_s)} total_ms={_ms(facts.total_s)} "
        f"tries={facts.num_tries}" + (f" rule={facts.rule}" if facts.rule else "")
    )


@lru_cache(maxsize=2)
def _second(at_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at_s))


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"
