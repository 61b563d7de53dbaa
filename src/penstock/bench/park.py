"""`penstock bench engine --park N`: an engine is parked and woken so many times, and its tokens are compared."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from penstock.bench.engine import ParkRound, make_requests
from penstock.bench.offline import run_offline
from penstock.bench.roofline import EngineWorkload
from penstock.core.clock import MonotonicClock
from penstock.core.request import Request, TokenEvent
from penstock.core.sampling import SamplingParams
from penstock.engine.ports import DeviceMemory
from penstock.sched.plan import Runner
from penstock.sched.scheduler import Scheduler

_COMPARED = EngineWorkload("compared", [(200, 32)] * 8)
_FIRST = EngineWorkload("first", [(128, 1)])


class ParkBench:
    def __init__(self, memory: DeviceMemory, runner: Runner, make_scheduler: Callable[[], Scheduler], vocab_size: int):
        self._memory = memory
        self._runner = runner
        self._make_scheduler = make_scheduler
        self._vocab_size = vocab_size
        self._compared()  # as warm as it will be
        self._before = self._compared()

    def round(self) -> ParkRound:
        parked = self._memory.park()
        woken = self._memory.wake()
        first = make_requests(_FIRST, self._vocab_size, seed=0)
        first_token_s = run_offline(first, self._make_scheduler(), self._runner, MonotonicClock()).seconds
        return ParkRound(
            parked.seconds, parked.num_bytes, woken.seconds, first_token_s, self._compared() == self._before
        )

    def _compared(self) -> list[TokenEvent]:
        """Answers of requests that are always the same, greedy ones and others, with their log probabilities."""
        requests = [
            self._request(one, place) for place, one in enumerate(make_requests(_COMPARED, self._vocab_size, 0))
        ]
        found = run_offline(requests, self._make_scheduler(), self._runner, MonotonicClock())
        return [replace(event, timings=None) for event in found.events]

    @staticmethod
    def _request(request: Request, place: int) -> Request:
        sampling = SamplingParams(temperature=0.8 * (place % 2), seed=place, num_logprobs=4)
        return replace(request, sampling=sampling)


def line(number: int, found: ParkRound) -> str:
    return (
        f"park {number}  {found.park_total_s:6.3f} s ({_phases(found.park_s)}), "
        f"{found.given_back_bytes / 2**30:.2f} GiB given back  wake {found.wake_total_s:6.3f} s "
        f"({_phases(found.wake_s)}, first token {found.first_token_s:.3f})  "
        f"tokens {'equal to the bit' if found.is_equal else 'DIFFER'}"
    )


def _phases(seconds: dict[str, float]) -> str:
    return ", ".join(f"{phase} {value:.3f}" for phase, value in seconds.items())
