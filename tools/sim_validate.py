"""Whether a simulation is right: two real replicas behind a real gateway, and the same fleet simulated.

    python -m tools.sim_validate TRACE [--model smollm2] [--busy 0.5] [--count 120] [--first 0] [--cores 0,1]

Two replicas of one thread, on a core each, write step logs under a mixed load: that is the profile. What shares the
cores with them, the gateway and the client too, is in it. Then they answer a slice of the trace, so fast that by the
simulator a step runs for the given share of the time, and it is asked the same. Prompts longer than `--most-prompt` and
answers longer than `--most-output` are cut, in both.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.sim.calibrate import calibrate, read_steps
from penstock.sim.flight import Ask
from penstock.sim.profile import Profile, write_profile
from penstock.sim.result import Result
from penstock.sim.simulation import Simulation
from penstock.sim.workload import replay, speed_for, that_fit
from penstock.workload.trace import Arrival, read_trace

ENGINE = ["--threads", "1", "--device", "cpu", "--speculate", "off"]  # the simulator does not guess
MAX_OFF = 0.15
_START_S = 120.0
_REQUEST_S = 0.004  # what HTTP, the gateway and the client take on such a machine


@contextmanager
def running(command: list[str], core: int | None, url: str, log: Path) -> Iterator[None]:
    """A process until it is left, from when it is ready."""
    pinned = ["taskset", "-c", str(core), *command] if core is not None else command
    with log.open("w") as output:
        process = subprocess.Popen(pinned, stdout=output, stderr=output)
        try:
            _wait(url, process, log)
            yield
        finally:
            process.terminate()
            process.wait(30)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit(f"{' '.join(map(str, process.args))} ended:\n{log.read_text()[-2000:]}")  # type: ignore[arg-type]
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    sys.exit(f"{url} is not ready after {_START_S:.0f} s:\n{log.read_text()[-2000:]}")


def penstock(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "penstock", *arguments]


def engine(model: str, port: int, *more: str) -> list[str]:
    return penstock("engine", model, "--port", str(port), "--log-level", "warning", *ENGINE, *more)


def bench(url: str, directory: Path, *load: str) -> dict[str, Any]:
    """Returns what was measured of one load."""
    out = directory / "bench.json"
    command = penstock(
        "bench", "serve", "--url", url, "--endpoint", "completions", "--quiet", "--json", str(out), *load
    )
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (point,) = json.loads(out.read_text())["points"]
    return dict(point)


@contextmanager
def fleet(model: str, cores: list[int], directory: Path) -> Iterator[str]:
    """A gateway's URL, in front of a replica on each core; what their steps took is in `steps0.csv` and so on."""
    own, urls = free_port(), list[str]()
    with ExitStack() as stack:
        for number, core in enumerate(cores):
            port = free_port()
            urls.append(f"http://127.0.0.1:{port}")
            command = engine(model, port, "--step-log", str(directory / f"steps{number}.csv"))
            stack.enter_context(running(command, core, urls[-1], directory / f"replica{number}.log"))
        config = directory / "gateway.yaml"
        config.write_text(json.dumps({"port": own, "models": {model: {"replicas": urls}}}))
        url = f"http://127.0.0.1:{own}"
        stack.enter_context(running(penstock("gateway", "--config", str(config)), None, url, directory / "gateway.log"))
        yield url


def learn(model: str, cores: list[int], directory: Path) -> Profile:
    """Learns a profile by prompts alone, decodes alone, and both at once, of all lengths that come."""
    with fleet(model, cores, directory) as url:
        for each in (1, 2, 4, 8):
            bench(
                url,
                directory,
                "--model",
                model,
                "--concurrency",
                str(each * len(cores)),
                "--requests",
                str((8 + 2 * each) * len(cores)),
                "--prompt-tokens",
                "32:600",
                "--output-tokens",
                "2:100",
                "--seed",
                str(each),
            )
    logs = [read_steps(directory / f"steps{number}.csv") for number in range(len(cores))]
    fit = calibrate([step for steps, _ in logs for step in steps[10:]])
    print(fit.summary(), file=sys.stderr)
    return replace(fit.profile("validated", logs[0][1]), request_s=_REQUEST_S)


def cut(arrivals: list[Arrival], most_prompt: int, most_output: int) -> list[Arrival]:
    return [
        one._replace(
            prompt_tokens=min(one.prompt_tokens, most_prompt), output_tokens=min(one.output_tokens, most_output)
        )
        for one in arrivals
    ]


def find_speed(arrivals: list[Arrival], profile: Profile, num_replicas: int, busy: float) -> float:
    speed = speed_for(arrivals, profile, num_replicas, busy)
    for _ in range(6):
        speed *= busy / Simulation(profile, num_replicas).run(replay(arrivals, speed)).busy
    return speed


def write_trace(arrivals: list[Arrival], path: Path) -> None:
    """Writes arrivals in Azure's form."""
    rows = [
        f"2023-11-16 {int(one.at_s // 3600):02}:{int(one.at_s // 60) % 60:02}:{one.at_s % 60:010.7f},"
        f"{one.prompt_tokens},{one.output_tokens}"
        for one in arrivals
    ]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")


def measure(model: str, cores: list[int], trace: Path, speed: float, directory: Path) -> dict[str, Any]:
    with fleet(model, cores, directory) as url:
        return bench(
            url, directory, "--model", model, "--trace", str(trace), "--speed", f"{speed:.6f}", "--warmup", "4"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--busy", type=float, default=0.5, help="share of the time in which a step runs")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--most-prompt", type=int, default=512)
    parser.add_argument("--most-output", type=int, default=64)
    parser.add_argument("--cores", default="0,1")
    given = parser.parse_args()
    cores = [int(core) for core in given.cores.split(",")]
    with tempfile.TemporaryDirectory(prefix="penstock-") as temporary:
        directory = Path(temporary)
        profile = learn(given.model, cores, directory)
        arrivals = cut(read_trace(given.trace, given.first, given.count), given.most_prompt, given.most_output)
        arrivals = that_fit(arrivals, profile)
        speed = find_speed(arrivals, profile, len(cores), given.busy)
        write_trace(arrivals, directory / "slice.csv")
        measured = measure(given.model, cores, directory / "slice.csv", speed, directory)
        simulation = Simulation(profile, len(cores))
        rows = [row for row in measured["requests"] if row["error"] is None]
        asks = [Ask(row["intended_s"], row["prompt_tokens"], row["output_tokens"]) for row in rows]
        simulated = simulation.run(sorted(asks, key=lambda ask: ask.at_s))
        print(write_profile(profile))
        sys.exit(0 if agrees(simulated, measured, len(asks)) else 1)


def agrees(simulated: Result, measured: dict[str, Any], num_answers: int) -> bool:
    """Prints both; whether what is promised to agree does."""
    pairs = {
        "TTFT p50, s": (simulated.ttft_s.p50 or 0.0, measured["ttft"]["p50"], True),
        "TTFT p95, s": (simulated.ttft_s.p95 or 0.0, measured["ttft"]["p95"], False),
        "TPOT p50, s": (simulated.tpot_s.p50 or 0.0, measured["tpot"]["p50"], False),
        "output tokens/s": (simulated.output_tokens_per_s, measured["output_tokens_per_s"], True),
        "hit rate": (simulated.hit_rate, measured["cached_tokens"] / measured["prompt_tokens"], False),
    }
    print(f"{num_answers} answers, errors: {measured['errors'] or 'none'}; doubts: {measured['doubts'] or 'none'}")
    print(f"replicas busy with a step {simulated.busy:.0%} of the time, work {simulated.utilisation:.0%}")
    print(f"{'':16} {'simulated':>10} {'measured':>10} {'off by':>8}")
    is_right = True
    for name, (said, seen, is_promised) in pairs.items():
        off = said / seen - 1.0 if seen else 0.0
        is_right &= not is_promised or abs(off) <= MAX_OFF
        print(f"{name:16} {said:10.4f} {seen:10.4f} {off:+8.1%}{'' if is_promised else '  (not promised)'}")
    print(f"promised within {MAX_OFF:.0%}: {'kept' if is_right else 'NOT kept'}")
    return is_right


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main()
