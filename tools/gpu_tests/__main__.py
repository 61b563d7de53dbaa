"""Every test that needs a GPU: `make test-gpu PART=1/3`, on a machine with a card and no network.

A file is a pytest process of its own. Those of kernels share the card; those of engines have it to themselves, since
engines measure how much of it is free. Before that the kernels are compiled in parallel, into Triton's cache on disk.
A third takes at most 8 minutes on an H200 with 16 cores. `PYTHON` names the interpreter that has torch and Triton;
nothing is installed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ROOT / ".gpu-packages"  # what the machine lacks, if somebody has fetched it: see `packages.py`
PLUGIN = ["-p", "tools.gpu_tests.plugin", "-p", "no:cacheprovider"]
FILE_LIMIT_S = 700
NUM_SHARING = 4  # files of kernels at a time: their tests leave the card idle for most of the time
COMPILE_LIMIT_S = 150
# Seconds on an H200, so that parts take about as long; of files that share the card, a quarter. Compiling adds 100 s to
# each of three parts on a machine that has never run them. `tests/test_gpu_tests.py` finds a file that is missing here.
FILES = {
    "tests/model/ops/triton/test_triton_attention.py": 8,
    "tests/model/ops/triton/test_triton_lora.py": 6,
    "tests/model/ops/triton/test_triton_kv_copy.py": 1,
    "tests/model/ops/triton/test_triton_moe.py": 25,
    "tests/model/ops/triton/test_triton_q6k.py": 2,
    "tests/model/ops/triton/test_triton_fp8_kv.py": 4,
    "tests/model/ops/triton/test_triton_w4a16.py": 8,
    "tests/model/ops/triton/test_triton_linear.py": 12,
    "tests/model/ops/triton/test_triton_drafts.py": 3,
    "tests/model/ops/triton/test_triton_sequence.py": 10,
    "tests/model/ops/triton/test_triton_shared_prefix.py": 10,
    "tests/model/ops/triton/test_triton_delta.py": 2,
    "tests/model/ops/triton/test_triton_latent.py": 2,
    "tests/model/ops/test_reference.py": 4,
    "tests/model/test_triton_families.py": 15,
    "tests/cli/test_cuda_several.py": 48,
    "tests/equality/test_encoders.py": 8,
    "tests/equality/test_gpu_formats.py": 17,
    "tests/equality/test_gpu_model.py": 104,
    "tests/runner/test_assemble.py": 9,
    "tests/runner/test_cuda_adapters.py": 28,
    "tests/runner/test_cuda_drafted_adapters.py": 19,
    "tests/runner/test_cuda_drafts.py": 30,
    "tests/runner/test_cuda_families.py": 110,
    "tests/runner/test_cuda_images.py": 15,
    "tests/runner/test_cuda_memory.py": 17,
    "tests/runner/test_cuda_moving.py": 4,
    "tests/runner/test_cuda_park.py": 16,
    "tests/runner/test_cuda_rank_transfer.py": 31,
    "tests/runner/test_cuda_ranks.py": 182,
    "tests/runner/test_cuda_runner.py": 31,
    "tests/runner/test_cuda_sharing.py": 14,
    "tests/runner/test_cuda_soak.py": 55,
    "tests/runner/test_cuda_transfer.py": 22,
    "tests/transfer/test_networks.py": 8,
    "tests/runner/test_gpu_embedder.py": 8,
    "tests/runner/test_masks.py": 2,
    "tests/runner/test_step_message.py": 13,
    "tests/runner/test_embedder.py": 12,
    "tests/model/test_encoder.py": 3,
    "tests/model/test_upload.py": 1,
}


@dataclass(frozen=True)
class Outcome:
    file: str
    seconds: float
    summary: str
    report: str | None  # what pytest printed, if something failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-gpu", description=__doc__)
    parser.add_argument("--part", default="1/1", help="1/3 is the first of three parts")
    parser.add_argument("files", nargs="*", help="only these")
    arguments = parser.parse_args()
    index, count = map(int, arguments.part.split("/"))
    files = arguments.files or parts(count)[index - 1]
    if subprocess.call(
        [sys.executable, "-c", "import torch; assert torch.cuda.is_available()"], stderr=subprocess.DEVNULL
    ):
        print(f"{sys.executable} has no torch that sees a GPU. PYTHON= names one that has.", file=sys.stderr)
        return 2
    if broken := collection_errors(files):
        print(f"{broken}\nnothing was run: these tests cannot be imported here", file=sys.stderr)
        return 2
    began_s = time.monotonic()
    compile_kernels(files)
    print(f"{time.monotonic() - began_s:7.1f} s  kernels compiled", flush=True)
    outcomes = []
    for outcome in run_all(files):
        outcomes.append(outcome)
        print(f"{outcome.seconds:7.1f} s  {outcome.summary:40} {outcome.file}", flush=True)
        for line in re.findall(r"^(?:FAILED|ERROR) .*", outcome.report or "", re.MULTILINE):
            print(f"           {line}", flush=True)  # at once: the machine may be gone before the end
    failed = [outcome for outcome in outcomes if outcome.report is not None]
    for outcome in failed:
        print(f"\n=== {outcome.file}\n{outcome.report}")
    print(f"\npart {arguments.part}: {len(outcomes)} files, {len(failed)} with failures, ", end="")
    print(f"{time.monotonic() - began_s:.0f} s")
    return int(bool(failed))


def parts(count: int) -> list[list[str]]:
    """The files, shared out so that each part takes about as long; the order within a part is that of the list."""
    loads = [0] * count
    of_part: dict[str, int] = {}
    for file, seconds in sorted(FILES.items(), key=lambda entry: -entry[1]):
        of_part[file] = loads.index(min(loads))
        loads[of_part[file]] += seconds
    return [[file for file in FILES if of_part[file] == part] for part in range(count)]


def collection_errors(files: list[str]) -> str:
    """Output of pytest if a file cannot be imported, or nothing. Found first: minutes on a card are few."""
    command = [sys.executable, "-m", "pytest", *PLUGIN, "--collect-only", "-q", "--tb=short", "--no-header", *files]
    collected = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    return collected.stdout[-4000:] + collected.stderr[-2000:] if collected.returncode not in (0, 5) else ""


def compile_kernels(files: list[str]) -> None:
    """Fill Triton's cache. Nothing is computed in this pass: assertions assert nothing, so that every test goes on to
    its last launch, and nobody looks at what fails all the same."""
    kernel_files = [file for file in files if re.search("/test_(triton|gpu_formats)", file)]
    if not kernel_files:
        return
    num_processes = max(len(os.sched_getaffinity(0)) - 2, 1)
    command = [sys.executable, "-m", "pytest", *PLUGIN, "--assert=plain", "--tb=no", *kernel_files]
    running = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment() | {"PENSTOCK_COMPILE_SHARE": f"{number}/{num_processes}"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for number in range(num_processes)
    ]
    until_s = time.monotonic() + COMPILE_LIMIT_S
    for process in running:
        try:
            process.wait(max(until_s - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run_all(files: list[str]) -> Iterator[Outcome]:
    sharing = [file for file in files if file.startswith("tests/model/")]
    with ThreadPoolExecutor(NUM_SHARING) as pool:
        for done in as_completed([pool.submit(run, file) for file in sharing]):
            yield done.result()
    yield from (run(file) for file in files if file not in sharing)


def run(file: str) -> Outcome:
    began_s = time.monotonic()
    command = [sys.executable, "-m", "pytest", *PLUGIN, "--tb=short", "--no-header", file]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(FILE_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        output.seek(0)
        printed = output.read()
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)\b", printed.rpartition("\n\n")[2] or printed)
    summary = ", ".join(counts[-4:]) or ("nothing to run" if code == 5 else f"ended with {code}")
    return Outcome(file, time.monotonic() - began_s, summary, None if code in (0, 5) else printed[-6000:])


def environment() -> dict[str, str]:
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", ""), str(PACKAGES)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


if __name__ == "__main__":
    sys.exit(main())
