"""The same ONNX models in penstock and in Triton, side by side: `python -m tools.tensors_beside [--rounds 5]`.

Triton is the server of nvidia-pytriton (`python tools/peers/install.py .peers triton`), whose only backend is Python:
ONNX Runtime inside a Python model, which puts the requests of a batch together as penstock does. Both get the same
files, batching, threads and bytes: HTTP with binary data, from one load generator with a fixed number of connections
that each ask again once they are answered; or with `--rate` from arrivals that are the same for both, however fast the
answers come. Rounds take turns, so that other work on the machine falls on both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import psutil
import uvloop
from onnx import TensorProto, helper, numpy_helper

_FEATURES = 64
_SHAPES = {"tiny": [8], "small": [512, 512], "medium": [2048, 2048, 2048]}  # widths of the hidden layers
_CLASSES = 10
_MAX_BATCH = 32
_START_S = 60.0
_WARM_S = 1.0
_TRITON_MODEL = """
import numpy as np
import onnxruntime as ort
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = {threads}, 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        path = args["model_repository"] + "/" + args["model_version"] + "/model.onnx"
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        [found] = self.session.run(None, {{"x": arrays[0] if len(arrays) == 1 else np.concatenate(arrays)}})
        responses, at = [], 0
        for array in arrays:
            part = np.ascontiguousarray(found[at : at + len(array)])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("probabilities", part)]))
            at += len(array)
        return responses
"""
_CONFIG = """
max_batch_size: {most}
input [ {{ name: "x", data_type: TYPE_FP32, dims: [ {features} ] }} ]
output [ {{ name: "probabilities", data_type: TYPE_FP32, dims: [ {classes} ] }} ]
instance_group [ {{ count: 1, kind: KIND_CPU }} ]
dynamic_batching {{ max_queue_delay_microseconds: 0 }}
"""


class Place(NamedTuple):
    server: str
    port: int
    process: psutil.Process

    def cpu_s(self) -> float:
        """The CPU seconds of all its processes."""
        times = [one.cpu_times() for one in (self.process, *self.process.children(recursive=True))]
        return sum(one.user + one.system for one in times)


class Round(NamedTuple):
    cpu_us: float  # of the server, for a request
    per_s: float
    p50_ms: float
    p99_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.tensors_beside", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--models", nargs="+", choices=list(_SHAPES), default=list(_SHAPES))
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rate", type=float, help="requests a second, as long as a connection is free")
    parser.add_argument("--rows", type=int, default=1, help="of each request")
    parser.add_argument("--peer", type=Path, default=Path(".peers/triton"), help="the environment with nvidia-pytriton")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tensors-beside-") as directory, contextlib.ExitStack() as servers:
        root = Path(directory)
        for name in arguments.models:
            _save(root / "penstock" / name, _SHAPES[name])
        places = [
            servers.enter_context(_penstock(root)),
            servers.enter_context(_triton(root, arguments.peer.absolute())),
        ]
        _check(places, arguments.models)
        told = [f"{one.server}: a second, p50, p99, CPU of a request" for one in places]
        print("| model | connections | " + " | ".join(told) + " | ratios |")
        print("|---|--:|--:|--:|--:|")
        for model in arguments.models:
            for connections in arguments.connections:
                _print(model, connections, _measure(places, model, connections, arguments))


def _measure(places: list[Place], model: str, connections: int, arguments: Any) -> dict[str, list[Round]]:
    found: dict[str, list[Round]] = {one.server: [] for one in places}
    for one in places:
        uvloop.run(_load(one, model, arguments.rows, connections, _WARM_S))
    for number in range(arguments.rounds):
        for one in places if number % 2 == 0 else places[::-1]:
            found[one.server].append(
                uvloop.run(_load(one, model, arguments.rows, connections, arguments.seconds, arguments.rate))
            )
    return found


def _print(model: str, connections: int, found: dict[str, list[Round]]) -> None:
    medians = {name: Round(*map(statistics.median, zip(*rounds, strict=True))) for name, rounds in found.items()}
    cells = [
        f"{one.per_s:,.0f}, {one.p50_ms:.2f} ms, {one.p99_ms:.2f} ms, {one.cpu_us:.0f} µs" for one in medians.values()
    ]
    ours, theirs = medians.values()
    rate, p99, cpu = ours.per_s / theirs.per_s, ours.p99_ms / theirs.p99_ms, ours.cpu_us / theirs.cpu_us
    ratio = f"{rate:.2f} of its rate, {p99:.2f} of its p99, {cpu:.2f} of its CPU"
    print(f"| {model} | {connections} | " + " | ".join(cells) + f" | {ratio} |", flush=True)


# -- the load


class _Connection(asyncio.Protocol):
    """Asks the same again and again, and notes how long each answer took."""

    def __init__(self, request: bytes, arrivals: deque[float] | None = None) -> None:
        """`arrivals`: requests that wait for a connection, by when they came; None: it asks again by itself."""
        self.latencies_s: list[float] = []
        self.is_idle = False
        self._arrivals = arrivals
        self.answer = b""
        self._request = request
        self._transport: Any = None
        self._data = b""
        self._asked_s = 0.0
        self._is_over = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.go_on()

    def go_on(self) -> None:
        """Asks what is to be asked next, if there is anything."""
        if self._arrivals is None:
            self._ask(time.perf_counter())
        elif self._arrivals:
            self._ask(self._arrivals.popleft())
        else:
            self.is_idle = True

    def data_received(self, data: bytes) -> None:
        self._data = data if not self._data else self._data + data
        head = self._data.find(b"\r\n\r\n")
        if head < 0:
            return
        lines = self._data[:head].lower()
        at = lines.index(b"content-length:") + 15
        end = lines.find(b"\r", at)
        if len(self._data) < head + 4 + int(lines[at : end if end > 0 else None]):
            return
        if not lines.startswith(b"http/1.1 200"):
            self.ended.set_exception(RuntimeError(self._data.decode(errors="replace")))
            return
        self.latencies_s.append(time.perf_counter() - self._asked_s)
        self.answer, self._data = self._data[head + 4 :], b""
        if self._is_over:
            self._transport.close()
            self.ended.set_result(None)
        else:
            self.go_on()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(error or ConnectionResetError("the server closed the connection"))

    def end(self) -> None:
        """Ends the connection after the answer that is under way."""
        self._is_over = True
        if self.is_idle:
            self._transport.close()
            self.ended.set_result(None)

    def _ask(self, since_s: float) -> None:
        self.is_idle, self._asked_s = False, since_s
        self._transport.write(self._request)


async def _arrive(arrivals: deque[float], opened: list[_Connection], rate: float) -> None:
    """Lets requests arrive as a Poisson process: the same each time."""
    dice, at_s = random.Random(0), time.perf_counter()
    while True:
        at_s += dice.expovariate(rate)
        await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
        arrivals.append(at_s)
        if (idle := next((one for one in opened if one.is_idle), None)) is not None:
            idle.go_on()


async def _load(
    place: Place, model: str, rows: int, connections: int, seconds: float, rate: float | None = None
) -> Round:
    loop, request = asyncio.get_running_loop(), _request(model, rows)
    arrivals: deque[float] | None = None if rate is None else deque()
    opened = [
        (await loop.create_connection(lambda: _Connection(request, arrivals), "127.0.0.1", place.port))[1]
        for _ in range(connections)
    ]
    arriving = loop.create_task(_arrive(arrivals, opened, rate)) if arrivals is not None and rate is not None else None
    await asyncio.sleep(0.2)
    for one in opened:
        one.latencies_s.clear()
    began_s, before_s = time.perf_counter(), place.cpu_s()
    await asyncio.sleep(seconds)
    cpu_s = place.cpu_s() - before_s
    took_s, found = time.perf_counter() - began_s, sorted(value for one in opened for value in one.latencies_s)
    if arriving is not None:
        arriving.cancel()
    for one in opened:
        one.end()
    await asyncio.gather(*(one.ended for one in opened))
    cpu_us = 1e6 * cpu_s / len(found)
    return Round(cpu_us, len(found) / took_s, 1e3 * found[len(found) // 2], 1e3 * found[int(0.99 * (len(found) - 1))])


def _rows(rows: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, _FEATURES)).astype(np.float32)


def _request(model: str, rows: int) -> bytes:
    data = _rows(rows).tobytes()
    tensor = {
        "name": "x",
        "datatype": "FP32",
        "shape": [rows, _FEATURES],
        "parameters": {"binary_data_size": len(data)},
    }
    wanted = [{"name": "probabilities", "parameters": {"binary_data": True}}]
    body = json.dumps({"inputs": [tensor], "outputs": wanted}).encode()
    head = (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/octet-stream\r\n"
        f"Inference-Header-Content-Length: {len(body)}\r\nContent-Length: {len(body) + len(data)}\r\n\r\n"
    )
    return head.encode() + body + data


def _check(places: list[Place], models: list[str]) -> None:
    """Both answer the same."""
    for model in models:
        found = []
        for place in places:
            with socket.create_connection(("127.0.0.1", place.port)) as connection:
                connection.sendall(_request(model, 1))
                data = connection.recv(1 << 16)
                found.append(np.array(struct.unpack(f"<{_CLASSES}f", data[-4 * _CLASSES :])))
        if not np.allclose(*found, atol=1e-6):
            raise SystemExit(f"{model}: the answers differ: {found}")


# -- servers


def _threads() -> int:
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def _penstock(root: Path) -> Iterator[Place]:
    port = _free_port()
    command = [sys.executable, "-m", "penstock", "serve", str(root / "penstock"), "--port", str(port)]
    with _running(command, {}, root / "penstock.log", f"http://127.0.0.1:{port}/v2/health/ready") as process:
        yield Place("penstock", port, process)


@contextlib.contextmanager
def _triton(root: Path, peer: Path) -> Iterator[Place]:
    packages = next(peer.glob("lib/python3*/site-packages"))
    server, version = packages / "pytriton/tritonserver", packages.parent.name.removeprefix("python")
    repository, backends, port = root / "triton", root / "backends", _free_port()
    shutil.copytree(server / "backends", backends)
    shutil.copy(server / "python_backend_stubs" / version / "triton_python_backend_stub", backends / "python")
    for model in (root / "penstock").iterdir():
        path = repository / model.name
        shutil.copytree(model / "1", path / "1")
        (path / "1/model.py").write_text(_TRITON_MODEL.format(threads=_threads()))
        (path / "config.pbtxt").write_text((model / "config.pbtxt").read_text() + 'backend: "python"\n')
    command = [
        str(server / "bin/tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        f"--http-port={port}",
        "--allow-grpc=false",
        "--allow-metrics=false",
    ]
    own = subprocess.run(
        [peer / "bin/python", "-c", "import sys; print(sys.base_prefix)"], capture_output=True, text=True, check=True
    )
    libraries = f"{own.stdout.strip()}/lib:{packages / 'nvidia_pytriton.libs'}"
    environment = {"LD_LIBRARY_PATH": libraries, "PATH": f"{peer / 'bin'}:{os.environ['PATH']}"}
    with _running(command, environment, root / "triton.log", f"http://127.0.0.1:{port}/v2/health/ready") as process:
        yield Place("Triton", port, process)


@contextlib.contextmanager
def _running(command: list[str], environment: dict[str, str], log: Path, url: str) -> Iterator[psutil.Process]:
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | environment) as process,
    ):
        try:
            until_s = time.monotonic() + _START_S
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1.0):
                    break
                if process.poll() is not None or time.monotonic() > until_s:
                    raise SystemExit(f"{command[0]} does not start:\n{log.read_text()[:6000]}")
                time.sleep(0.1)
            yield psutil.Process(process.pid)
        finally:
            process.terminate()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _save(path: Path, widths: list[int]) -> None:
    dice, name, size = np.random.default_rng(0), "x", _FEATURES
    nodes, weights = [], []
    for number, width in enumerate([*widths, _CLASSES]):
        weights.append(numpy_helper.from_array(_matrix(dice, size, width), f"weight{number}"))
        nodes.append(helper.make_node("MatMul", [name, f"weight{number}"], [f"sum{number}"]))
        nodes.append(helper.make_node("Relu", [f"sum{number}"], [f"layer{number}"]))
        name, size = f"layer{number}", width
    nodes[-1] = helper.make_node("Softmax", [nodes[-2].output[0]], ["probabilities"], axis=-1)
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", _FEATURES])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", _CLASSES])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    (path / "1").mkdir(parents=True)
    onnx.save(model, str(path / "1/model.onnx"))
    (path / "config.pbtxt").write_text(_CONFIG.format(most=_MAX_BATCH, features=_FEATURES, classes=_CLASSES))


def _matrix(dice: np.random.Generator, size: int, width: int) -> np.ndarray:
    return (dice.standard_normal((size, width)) / np.sqrt(size)).astype(np.float32)


if __name__ == "__main__":
    main()
