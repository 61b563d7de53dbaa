"""Every check and every test, and one summary at the end: `make test`.

The parts are the checks (format, lint, types, imports, generated files), the fast tests and the slow ones; the checks
run beside the tests. Files of tests have a budget of CPU seconds in `tests/budget.toml`; a file that takes more than
three times that is run again by itself, and fails the run when it takes that much every time. CPU seconds are those of
pytest's own process, scaled by how fast the processor was at the time. `--write-budget` writes the budgets anew from
this run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from tests.reporting import BUDGET, REPORT, Report, command_for, read_budgets

from penstock.hub.home import penstock_home

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
CHECKS = {
    "format": ["ruff", "format", "--check", "."],
    "lint": ["ruff", "check", "."],
    "types": ["mypy"],
    "imports": ["lint-imports"],
    "reference docs": ["python", "-m", "tools.reference", "--check"],
    "console page": ["python", "tools/console.py", "--check"],
    "helm chart": ["python", "-m", "tools.helm", "--check"],
}
MARKERS = {"fast": "not slow", "slow": "slow and not drill"}
# More than there are cores, since tests wait too: for servers, disks and each other; slow ones more than fast ones.
NUM_WORKERS = {"fast": 4, "slow": 5}
BY_FILE = ["--maxschedchunk", "1", "-p", "tests.by_file", "-o", "console_output_style=classic"]
# A test that hangs fails, with the stacks of all threads. The bound is far from what any test takes on a busy machine.
# The second is for a test that no signal reaches: its worker ends, and xdist names the file and goes on with another.
HANGS_S = 600
BOUNDED = ["--timeout", str(HANGS_S), "--timeout-method", "signal", "-o", f"faulthandler_timeout={HANGS_S + 60}"]
BOUNDED += ["-o", "faulthandler_exit_on_timeout=true"]
DEFAULT_BUDGET_S = {"fast": 1.0, "slow": 5.0}
LONG_S = {"fast": 4.0, "slow": 15.0}  # a file that takes longer is handed out before the others
ALLOWED = 3  # a file may take so many times its budget: CPU seconds vary, with the cache that neighbours leave
NUM_MEASUREMENTS = 4  # of a file that seems to take too long: neighbours and threads that spin add, nothing subtracts
NUM_SLOWEST = 8
MEMORY = Path("/dev/shm")
MEMORY_BYTES = 1 << 30  # that must be free there


@dataclass
class Part:
    name: str
    seconds: float = 0.0
    report: Report = field(default_factory=Report)
    complaints: list[str] = field(default_factory=list)  # lines to show at the end
    num_complaints: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test", description=__doc__)
    parser.add_argument("parts", nargs="*", default=["checks", "fast", "slow"], help="checks, fast, slow; default: all")
    parser.add_argument("--report", type=Path, help="where a JSON report goes, which leaves out the budget")
    parser.add_argument("--write-budget", action="store_true")
    arguments = parser.parse_args()
    parts = run_parts(arguments.parts)
    tested = [part for part in parts if part.name in MARKERS]
    if arguments.write_budget:
        write_budget(tested)
    elif arguments.report is None:
        for part in tested:
            check_budget(part)
    if arguments.report is not None:
        arguments.report.write_text(json.dumps({part.name: vars(part.report) for part in parts}))
    return print_summary(parts)


def run_parts(names: Sequence[str]) -> list[Part]:
    """Tests wait for servers, disks and each other: the checks have the processors meanwhile, and give way to tests."""
    if set(names) == {"checks"}:
        return [run_checks(at_once=2)]
    with ThreadPoolExecutor(1) as beside:
        kernels = beside.submit(compile_kernels)
        checks = beside.submit(run_checks, at_once=1) if "checks" in names else None
        tested = {}
        for name in names:
            if name == "slow":
                kernels.result()  # else every server of the first tests would wait for them
            if name != "checks":
                tested[name] = run_tests(name)
        return [tested[name] if checks is None or name != "checks" else checks.result() for name in names]


def compile_kernels() -> None:
    """Fill the cache of the CPU's kernels. Where they cannot be compiled, the tests that need them say so."""
    compiling = "from penstock.model.ops.build import build_kernels; build_kernels()"
    subprocess.run([sys.executable, "-c", compiling], cwd=ROOT, capture_output=True)


def run_checks(at_once: int) -> Part:
    part = Part("checks")
    with _timed(part), ThreadPoolExecutor(at_once) as pool:
        for name, (code, output) in zip(CHECKS, pool.map(_check, CHECKS.values()), strict=True):
            print(f"{name}: {'ok' if code == 0 else 'failed'}", flush=True)
            if code:
                part.complaints += [f"{name}: {' '.join(CHECKS[name])}", output.rstrip()]
                part.num_complaints += 1
    return part


def _check(command: Sequence[str]) -> tuple[int, str]:
    """Runs a check. mypy's findings for each file stay in the penstock home: another checkout need not look again."""
    environment = os.environ | {"MYPY_CACHE_DIR": str(penstock_home() / "mypy")}
    done = subprocess.run(
        ["nice", BIN / command[0], *command[1:]], cwd=ROOT, capture_output=True, text=True, env=environment
    )
    return done.returncode, done.stdout + done.stderr


def run_tests(name: str) -> Part:
    part = Part(name)
    with _timed(part), _files_in_memory(name) as environment:
        code, part.report = run_pytest(["-m", MARKERS[name], "-n", str(NUM_WORKERS[name]), *BY_FILE], environment)
        if code and not part.report.failed:
            part.complaints.append(f"pytest ended with {code}")
            part.num_complaints += 1
    return part


@contextmanager
def _files_in_memory(name: str) -> Iterator[dict[str, str]]:
    """Stores of the fast tests are written to a disk thousands of times, and nobody minds to lose them."""
    if name != "fast" or not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < MEMORY_BYTES:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="t", dir=MEMORY) as directory:
        yield {"TMPDIR": directory}


def run_pytest(arguments: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})) -> tuple[int, Report]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "report.json"
        command = [sys.executable, "-m", "pytest", *arguments, *BOUNDED, "--no-header"]
        code = subprocess.call(command, cwd=ROOT, env={**os.environ, **environment, REPORT: str(path)})
        if not path.exists():
            return code, Report()
        found = json.loads(path.read_text())
        return code, Report(**found | {key: Counter(found[key]) for key in ("skipped", "seconds", "cpu_seconds")})


@contextmanager
def _timed(part: Part) -> Iterator[None]:
    began_s = time.monotonic()
    yield
    part.seconds = time.monotonic() - began_s


def check_budget(part: Part) -> None:
    budgets = read_budgets().get(part.name, {})
    for file, spent_s in scaled(part.report):
        budget_s = budgets.get(file, DEFAULT_BUDGET_S[part.name])
        for _ in range(1, NUM_MEASUREMENTS):
            if spent_s <= ALLOWED * budget_s:
                break
            print(f"{file} took {spent_s:.1f} s of CPU, its budget is {budget_s:.1f} s: again by itself", flush=True)
            _, alone = run_pytest(["-m", MARKERS[part.name], file])
            spent_s = min([spent_s, *(again_s for _, again_s in scaled(alone))])
        if spent_s > ALLOWED * budget_s:
            over = f"took {spent_s:.1f} s of CPU, more than {ALLOWED} times its budget of {budget_s:.1f} s"
            part.complaints.append(f"{file} {over} (tests/budget.toml)")
            part.num_complaints += 1


def scaled(report: Report) -> list[tuple[str, float]]:
    """CPU seconds of each file on a processor of the usual speed."""
    return [(file, spent_s / report.slowness.get(file, 1.0)) for file, spent_s in report.cpu_seconds.items()]


def write_budget(parts: Sequence[Part]) -> None:
    text = (
        "# CPU seconds of test files that take more than a file may without being named here, and how long the\n"
        "# longest take from beginning to end, in which order they are handed out; see tools/suite.py.\n"
    )
    for part in parts:
        text += f"\n[{part.name}]\n"
        for file, spent_s in sorted(scaled(part.report)):
            if spent_s > DEFAULT_BUDGET_S[part.name]:
                text += f'"{file}" = {spent_s:.1f}\n'
    longest = {
        file: seconds for part in parts for file, seconds in part.report.seconds.items() if seconds > LONG_S[part.name]
    }
    text += "\n[seconds]\n" + "".join(f'"{file}" = {longest[file]:.1f}\n' for file in sorted(longest))
    BUDGET.write_text(text)


def print_summary(parts: Sequence[Part]) -> int:
    print("\n" + "=" * 80)
    for part in parts:
        report = part.report
        counts = f"{report.passed} passed, {len(report.failed)} failed, {sum(report.skipped.values())} skipped"
        print(f"{part.name:8}{part.seconds:6.0f} s  {counts if part.name in MARKERS else ''}".rstrip())
    skipped = sum((part.report.skipped for part in parts), Counter())
    if skipped:
        print("\nskipped, by reason")
        for reason, count in skipped.most_common():
            print(f"{count:8}  {reason}")
    seconds = sum((part.report.seconds for part in parts), Counter())
    if seconds:
        print("\nwhere the time went: seconds, CPU seconds")
        cpu = sum((part.report.cpu_seconds for part in parts), Counter())
        for file, spent_s in seconds.most_common(NUM_SLOWEST):
            print(f"{spent_s:8.1f} {cpu[file]:6.1f}  {file}")
    for part in parts:
        print(*part.complaints, sep="\n", end="\n" * bool(part.complaints))
    failed = [nodeid for part in parts for nodeid in part.report.failed]
    if failed:
        print("\nfailed; each of these runs one alone")
        print(*(f"  {command_for(nodeid)}" for nodeid in failed), sep="\n")
    num_failed = len(failed) + sum(part.num_complaints for part in parts)
    passed = sum(part.report.passed for part in parts)
    print(f"\n{passed} passed, {num_failed} failed, {sum(skipped.values())} skipped")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
