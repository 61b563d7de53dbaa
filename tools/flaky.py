"""Proof that no test fails by chance: the suite again and again under bad conditions. `make test-flaky`.

Each condition wants a number of runs in a row without a failure. Every run is appended to `tests/flaky.jsonl` when it
ends, with a hash of its `src` and `tests`, so that the proof may be interrupted and goes on where it was, also after
other commits: code that is worked on every day has no day to stand still. The table of the runs in CONTRIBUTING.md is
written anew each time. A failure is recorded with the tests that failed, and its condition begins anew.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "tests" / "flaky.jsonl"
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- test-flaky: begin -->", "<!-- test-flaky: end -->"


@dataclass(frozen=True)
class Condition:
    part: str  # of tools/suite.py
    name: str
    runs: int
    load: int = 0  # processes that do nothing but count
    cores: str | None = None  # for taskset


CONDITIONS = [
    Condition("fast", "both cores busy", 20, load=2),
    Condition("slow", "both cores busy", 5, load=2),
    Condition("slow", "on one core", 2, cores="0"),
]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-flaky", description=__doc__)
    parser.add_argument("--part", choices=["fast", "slow"], help="only this one")
    parser.add_argument("--condition", choices=sorted({each.name for each in CONDITIONS}), help="only this one")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after so long")
    arguments = parser.parse_args()
    until_s = time.monotonic() + 60 * arguments.minutes
    tree = tree_id()
    for condition in CONDITIONS:
        if arguments.part not in (None, condition.part) or arguments.condition not in (None, condition.name):
            continue
        while num_in_a_row(condition) < condition.runs and time.monotonic() < until_s:
            entry = {"date": str(date.today()), "tree": tree, "part": condition.part, "condition": condition.name}
            entry |= run(condition)
            with RECORD.open("a") as record:
                record.write(json.dumps(entry) + "\n")
            write_table()
            print(json.dumps(entry), flush=True)
    return int(any(num_in_a_row(condition) < condition.runs for condition in CONDITIONS))


def tree_id() -> str:
    """One name for all commits whose `src` and `tests` are the same. What is not committed is refused."""
    paths = ["src", "tests", ":!tests/flaky.jsonl", ":!tests/budget.toml"]
    if subprocess.run(["git", "status", "--porcelain", "--", *paths], cwd=ROOT, capture_output=True).stdout:
        sys.exit("commit first: a run is recorded for what is committed")
    listed = subprocess.run(["git", "ls-files", "-s", "--", *paths], cwd=ROOT, capture_output=True).stdout
    hashed = subprocess.run(["git", "hash-object", "--stdin"], cwd=ROOT, input=listed, capture_output=True).stdout
    return hashed.decode()[:10]


def num_in_a_row(condition: Condition) -> int:
    """Runs since the last failure."""
    wanted = (condition.part, condition.name)
    runs = [entry for entry in read_record() if (entry["part"], entry["condition"]) == wanted]
    return len(list(takewhile(lambda entry: not entry["failed"], reversed(runs))))


def read_record() -> list[dict[str, object]]:
    return [json.loads(line) for line in RECORD.read_text().splitlines()] if RECORD.exists() else []


def run(condition: Condition) -> dict[str, object]:
    command = ["taskset", "-c", condition.cores] if condition.cores else []
    with tempfile.TemporaryDirectory() as directory, busy(condition.load):
        report = Path(directory) / "report.json"
        command += [sys.executable, "-m", "tools.suite", condition.part, "--report", str(report)]
        began_s = time.monotonic()
        with (Path(directory) / "output").open("w+") as output:
            code = subprocess.call(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
            seconds = round(time.monotonic() - began_s)
            output.seek(0)
            printed = output.read()
        found = json.loads(report.read_text())[condition.part] if report.exists() else {"passed": 0, "failed": ["all"]}
    if code:
        print(printed[-20_000:], flush=True)
    failed = found["failed"] or ([f"ended with {code}"] if code else [])
    return {"passed": found["passed"], "failed": failed, "seconds": seconds}


@contextmanager
def busy(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def write_table() -> None:
    rows: dict[tuple[str, ...], list[dict[str, object]]] = {}
    for entry in read_record():
        rows.setdefault((entry["tree"], entry["part"], entry["condition"]), []).append(entry)  # type: ignore[index]
    lines = [
        "| code | tests | condition | runs | runs with a failure | seconds | last |",
        "|---|---|---|---|---|---|---|",
    ]
    for (tree, part, condition), entries in rows.items():
        seconds = [int(entry["seconds"]) for entry in entries]  # type: ignore[call-overload]
        failures = sum(bool(entry["failed"]) for entry in entries)
        spread = f"{min(seconds)} to {max(seconds)}"
        lines.append(
            f"| {tree} | {part}, {entries[-1]['passed']} passed | {condition} | {len(entries)} | {failures} "
            f"| {spread} | {entries[-1]['date']} |"
        )
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n\n" + "\n".join(lines) + "\n\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    sys.exit(main())
