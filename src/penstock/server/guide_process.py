"""The process in which guides are tried before anybody works by them: `python -m penstock.server.guide_process`.

It holds the model's vocabulary and forks for every guide, so that the one that tries it may take only so much time and
memory and may even crash: the next begins as if nothing had been. It reads a `Model` and then `Trial`s from its
standard input, and ends with it; `Verdict`s go to its standard output, as they come.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from penstock.api import tokenizer_bundle as model_text
from penstock.core.crash_stacks import write_stacks_on_crash
from penstock.core.errors import InvalidRequest, UnsupportedParameter
from penstock.engine.mailbox import FrameReader, frame_of
from penstock.server.guide_protocol import Model, Trial, Verdict
from penstock.text.grammars import Vocabulary, Words, as_lark, try_out
from penstock.text.tokenizer import Tokenizer

MAX_CPU_S = 1  # of one trial
MAX_WALL_S = 20.0  # where it stands still; a trial that others leave little of the processor is no worse for it
MAX_MEMORY_BYTES = 1 << 30  # on top of the vocabulary
_STACK_BYTES = 4 << 20  # half of what the engine's threads have: what does not overflow here does not there
_MAX_AT_ONCE = 2
_KIND = 10  # how nice: those who generate go first

_INPUT, _OUTPUT = 0, 1
_trial_decoder = msgspec.msgpack.Decoder(Trial)
_model_decoder = msgspec.msgpack.Decoder(Model)


@dataclass
class _Attempt:
    number: int
    process_id: int
    deadline_s: float
    answer: bytearray = field(default_factory=bytearray)


class Trials:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._selector = selectors.DefaultSelector()
        self._waiting: deque[Trial] = deque()
        self._running: dict[int, _Attempt] = {}  # by the descriptor that its answer comes from

    def run(self, frames: FrameReader, early: list[bytes]) -> None:
        """Tries guides until the server is gone. `early`: what came with the model."""
        self._take(early)
        self._selector.register(_INPUT, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(0.1 if self._running else None):
                data = os.read(key.fd, 1 << 20)
                if key.fd != _INPUT:
                    self._read(key.fd, data)
                elif not data:
                    return
                else:
                    self._take(frames.feed(data))
            self._end_overdue()
            self._begin_waiting()

    def _take(self, payloads: list[bytes]) -> None:
        self._waiting += [_trial_decoder.decode(payload) for payload in payloads]
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        while self._waiting and len(self._running) < _MAX_AT_ONCE:
            self._begin(self._waiting.popleft())

    def _begin(self, trial: Trial) -> None:
        ours, theirs = os.pipe()
        process_id = os.fork()
        if process_id == 0:
            os.nice(_KIND)
            _limit()
            _write(theirs, msgspec.msgpack.encode(_try(self._vocabulary, trial)))
            os._exit(0)
        os.close(theirs)
        self._running[ours] = _Attempt(trial.number, process_id, time.monotonic() + MAX_WALL_S)
        self._selector.register(ours, selectors.EVENT_READ)

    def _read(self, descriptor: int, data: bytes) -> None:
        attempt = self._running[descriptor]
        if data:
            attempt.answer += data
            return
        self._selector.unregister(descriptor)
        os.close(descriptor)
        del self._running[descriptor]
        _, status = os.waitpid(attempt.process_id, 0)
        answer = bytes(attempt.answer) if status == 0 else msgspec.msgpack.encode(_died(attempt.number))
        _write(_OUTPUT, frame_of(answer))

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for attempt in self._running.values():
            if now > attempt.deadline_s:
                os.kill(attempt.process_id, signal.SIGKILL)


def _try(vocabulary: Vocabulary, trial: Trial) -> Verdict:
    """A guide that fails later than here ends its own answer only."""
    try:
        guide = as_lark(trial.guide)
        try_out(vocabulary, guide)
    except InvalidRequest as error:
        return Verdict(trial.number, None, error.message, isinstance(error, UnsupportedParameter))
    return Verdict(trial.number, guide)


def _died(number: int) -> Verdict:
    return Verdict(number, None, "it is too complex: to prepare it takes too much time or memory", is_unsupported=True)


def _limit() -> None:
    limits = {resource.RLIMIT_CPU: MAX_CPU_S, resource.RLIMIT_STACK: _STACK_BYTES, resource.RLIMIT_CORE: 0}
    with contextlib.suppress(OSError):  # only Linux says how much there is already
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + MAX_MEMORY_BYTES
    for kind, most in limits.items():
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _read_model() -> tuple[Model, FrameReader, list[bytes]]:
    frames = FrameReader()
    while True:
        data = os.read(_INPUT, 1 << 20)
        if not data:
            raise SystemExit
        if found := frames.feed(data):
            return _model_decoder.decode(found[0]), frames, found[1:]


def main() -> None:
    write_stacks_on_crash()
    for stop_signal in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the server decides when we stop
        signal.signal(stop_signal, signal.SIG_IGN)
    model, frames, early = _read_model()
    text = model_text.decode(model.text)
    tokenizer = Tokenizer.from_json(text.tokenizer, text.special_tokens)
    trials = Trials(Vocabulary(Words.of(tokenizer, text.vocab_size, model.eos_ids)))
    trials.run(frames, early)


if __name__ == "__main__":
    main()
