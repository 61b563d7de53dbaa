"""Engines of others, each in the virtual environment that tools/peers/install.py made for it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.waiting import eventually

_HOME = os.environ.get("PENSTOCK_PEERS", ".peers")


def python_of(peer: str) -> str:
    found = Path(_HOME, peer, "bin", "python")
    if not found.exists():
        pytest.skip(f"{peer} is not installed: make test-peers")
    return str(found.absolute())


def package_of(peer: str) -> Path:
    """A package of npm's."""
    found = Path(_HOME, peer, "package")
    if not found.exists():
        pytest.skip(f"{peer} is not installed: make test-peers")
    return found


def program_of(peer: str) -> str:
    """The one command of a package from npm."""
    found = Path(_HOME, peer, "node_modules", ".bin", peer)
    if not found.exists():
        pytest.skip(f"{peer} is not installed: make test-peers")
    return str(found.absolute())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def checkpoint(directory: Path) -> Path:
    """smollm2 as a Hugging Face directory, which these engines read."""
    found = directory / "smollm2"
    subprocess.run([sys.executable, "-m", "penstock", "convert", "smollm2", str(found)], check=True)
    return found


@contextlib.contextmanager
def running(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    caches = {"XDG_CACHE_HOME": str(log.parent), "PYTRITON_HOME": str(log.parent)}  # they leave much behind
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | caches | environment, start_new_session=True
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass
class Starting:
    """A server that has been started."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait(self) -> None:
        wait_for(f"{self.url}/health", self.process, self.log)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until it answers: some take minutes to load their code."""

    def answers() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10):
            return True
        return False

    eventually(answers, within_s=600.0)


@contextlib.contextmanager
def starting_vllm(model: Path, log: Path, *flags: str, cores: str = "0-1", **environment: str) -> Iterator[Starting]:
    """vLLM on these cores, with a model that it calls m."""
    port = free_port()
    command = [python_of("vllm"), "-m", "vllm.entrypoints.openai.api_server", "--port", str(port)]
    command += ["--model", str(model), "--served-model-name", "m", "--max-model-len", "2048"]
    command += ["--enforce-eager", "--dtype", "float32", *flags]
    environment |= {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with running(command, log, **environment) as process:
        yield Starting(f"http://127.0.0.1:{port}", process, log)


@contextlib.contextmanager
def starting_sglang(model: Path, log: Path, *flags: str) -> Iterator[Starting]:
    """SGLang on the CPU, with a model that it calls m. Its kernels are torch's; server, scheduler, cache are real."""
    port = free_port()
    command = [python_of("sglang"), "-m", "sglang.launch_server", "--port", str(port), "--device", "cpu"]
    command += ["--model-path", str(model), "--served-model-name", "m", "--context-length", "2048"]
    command += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--dtype", "float32"]
    command += ["--disable-overlap-schedule", "--disable-cuda-graph", "--skip-server-warmup"]
    command += ["--max-total-tokens", "8192", "--enable-metrics", "--enable-cache-report", *flags]
    environment = {"SGLANG_USE_CPU_ENGINE": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16", "HF_HUB_OFFLINE": "1"}
    with running(command, log, **environment) as process:
        yield Starting(f"http://127.0.0.1:{port}", process, log)


def library_path() -> str:
    """Triton's Python backend wants the interpreter's shared library."""
    return str(Path(sys.base_prefix, "lib"))
