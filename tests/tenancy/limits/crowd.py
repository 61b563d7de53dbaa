"""Several real processes that hammer one tenant, and what they did, counted from outside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import TracebackType

from tests.tenancy.limits.hammer import QUOTA
from tests.tenancy.limits.windows import Admission, fullest_window
from tests.waiting import eventually

ROOT = Path(__file__).parents[3]
assert QUOTA.tokens is not None
LIMIT = QUOTA.tokens.per_minute


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

    def until_full(self) -> None:
        """Waits until every process has begun, and so many were refused that the limit is reached."""
        eventually(lambda: self.count("from"), lambda begun: begun == len(self._logs))
        self.until_refused_since(0.0)

    def until_refused_since(self, begin: float, reason: str = "tokens_per_minute", num: int = 64) -> None:
        def refused() -> int:
            lines = [line for line in self.lines() if line[0] == "refused"]
            return sum(float(asked) > begin and why == reason for _, asked, why in lines)

        eventually(refused, lambda found: found >= num)

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

    def fullest(self) -> float:
        """Tokens in the fullest minute."""
        return fullest_window(self.admissions())
