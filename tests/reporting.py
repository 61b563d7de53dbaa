"""The report of a run of the tests: what each took in seconds and CPU seconds, skips by reason, and for a failure the
command that runs it alone. `tools/suite.py` reads the same as JSON.
"""

from __future__ import annotations

import json
import os
import shlex
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.processor import slowness

REPORT = "PENSTOCK_TEST_REPORT"  # where the JSON goes
BUDGET = Path(__file__).parent / "budget.toml"
_CPU, _SLOWNESS = "cpu_s", "slowness"


@dataclass
class Report:
    passed: int = 0
    failed: list[str] = field(default_factory=list)  # node ids
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    seconds: Counter[str] = field(default_factory=Counter)  # by file
    cpu_seconds: Counter[str] = field(default_factory=Counter)  # by file, of pytest's own process
    slowness: dict[str, float] = field(default_factory=dict)  # by file: how much slower the processor was than usual

    def add(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.seconds[file] += report.duration
        if _CPU in (found := dict(report.user_properties)):
            self.cpu_seconds[file] += found[_CPU]
            self.slowness[file] = max(self.slowness.get(file, 1.0), found[_SLOWNESS])
        if report.failed:
            if report.nodeid not in self.failed:
                self.failed.append(report.nodeid)
        elif report.skipped:
            self.skipped[reason_of(report)] += 1
        elif report.when == "call":
            self.passed += 1


def read_budgets() -> dict[str, dict[str, float]]:
    """CPU seconds that files of tests may take, by part and file."""
    return tomllib.loads(BUDGET.read_text()) if BUDGET.exists() else {}


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return str(getattr(report, "wasxfail", report.longrepr))


def command_for(nodeid: str) -> str:
    return f".venv/bin/python -m pytest {shlex.quote(nodeid)}"


class Reporter:
    """The plugin. With xdist, workers count CPU and the controller gathers what they report."""

    def __init__(self) -> None:
        self._report = Report()
        self._began_cpu_s = 0.0
        self._slowness = 1.0
        self._sampled: tuple[str, float] = ("", 0.0)  # in which file, and when in CPU seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Neighbours make a processor slower for minutes at a time: that is measured anew in each file and second."""
        file, now_s = item.nodeid.partition("::")[0], _cpu_s()
        if file != self._sampled[0] or now_s - self._sampled[1] > 1.0:
            self._slowness, self._sampled = slowness(), (file, now_s)
        self._began_cpu_s = _cpu_s()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.when == "teardown":
            item.user_properties += [(_CPU, _cpu_s() - self._began_cpu_s), (_SLOWNESS, self._slowness)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._report.add(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._report.failed.append(report.nodeid)
        elif report.skipped:
            self._report.skipped[reason_of(report)] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if path := os.environ.get(REPORT):
            Path(path).write_text(json.dumps(vars(self._report)))
            return
        for line in summary_lines(self._report):
            terminalreporter.write_line(line)


def summary_lines(report: Report) -> list[str]:
    lines = [f"skipped {count:4}  {reason}" for reason, count in report.skipped.most_common()]
    if report.failed:
        lines += ["to run what failed alone:", *(f"  {command_for(nodeid)}" for nodeid in report.failed)]
    return lines


def _cpu_s() -> float:
    """Returns CPU seconds without those of children, which count when they are reaped, perhaps in another file."""
    times = os.times()
    return times.user + times.system
