"""Several real processes that hammer one tenant, and what they did, counted from outside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import TracebackType

from tests.tenancy.limits.hammer import QUOTA
from tests.tenancy.limits.windows import Admission, worst_excess
from tests.waiting import eventually

ROOT = Path(__file__).parents[3]
assert QUOTA.tokens is not None
PER_S = QUOTA.tokens.per_minute / 60
BURST = PER_S * QUOTA.tokens.burst_s


class Crowd:
    def __init__(
        self, logs: Path, kind: str, where: str, seconds: float = 600, processes: int = 4, clients: int = 16
    ) -> None:
        self._logs = [logs / f"hammer-{n}.log" for n in range(processes)]
        self._offsets = [0] * processes  # up to which each log has been read
        self._lines: list[list[str]] = []
        self.processes = []
        for n, log in enumerate(self._logs):
            command = [sys.executable, "-m", "tests.tenancy.limits.hammer", kind, where]
            with log.open("w") as out:
                arguments = [str(seconds), str(1 + n * clients), str(clients)]
                self.processes.append(subprocess.Popen([*command, *arguments], stdout=out, cwd=ROOT))

    def __enter__(self) -> Crowd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait(self) -> None:
        for process in self.processes:
            process.wait(timeout=60)

    def until_busy(self) -> None:
        """Until every process has been admitted, and so many were refused that the burst of the start is gone."""
        eventually(lambda: self.count("from"), lambda begun: begun == len(self._logs))
        eventually(lambda: self.count("refused"), lambda refused: refused >= 64)

    def until_admitted_since(self, begin: float, num: int = 60) -> None:
        eventually(lambda: sum(one.asked > begin for one in self.admissions()), lambda admitted: admitted >= num)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def host(self) -> subprocess.Popen[bytes]:
        return next(p for p, log in zip(self.processes, self._logs, strict=True) if log.read_text().startswith("host"))

    def lines(self) -> list[list[str]]:
        """Whole ones only: a killed process may have been in the middle of a line."""
        for n, log in enumerate(self._logs):
            with log.open() as file:
                file.seek(self._offsets[n])
                whole, end, _ = file.read().rpartition("\n")
            self._offsets[n] += len(whole) + len(end)
            self._lines += [line.split() for line in whole.splitlines()]
        return self._lines

    def admissions(self) -> list[Admission]:
        """Each with what it used; what a killed process never ended came back, and counts for nothing."""
        lines = self.lines()
        used = {(line[1], line[2]): int(line[3]) for line in lines if line[0] == "ended"}
        admitted = [line for line in lines if line[0] == "admitted"]
        return [Admission(float(a), float(b), used.get((name, id), 0)) for _, a, b, name, id, _ in admitted]

    def count(self, word: str) -> int:
        return sum(line[0] == word for line in self.lines())

    def broken_promises(self) -> int:
        """Until the first process ends: it may be the host, and told times do not survive a new one."""
        return sum(float(line[1]) < self.busy()[1] for line in self.lines() if line[0] == "broken")

    def excess(self) -> float:
        return worst_excess(self.admissions(), PER_S, BURST)

    def busy(self) -> tuple[float, float]:
        """From when the burst of the start is gone until clients stop because their next time is after the end."""
        spans = [(float(line[1]), float(line[3])) for line in self.lines() if line[0] == "from"]
        return max(begin for begin, _ in spans) + 1.0, min(end for _, end in spans) - 1.5

    def share_used(self, begin: float, end: float) -> float:
        """Of the bare rate, without the burst, between two times."""
        return sum(a.tokens for a in self.admissions() if begin <= a.asked < end) / (PER_S * (end - begin))
