"""The place of a drill: replicas, gateways and tenants, as an operator makes them: by command."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from tests.server.replica import NAME
from tests.template import ENGINE, engine_of, forking, started_by
from tests.text.small import byte_level, load
from tests.waiting import eventually

MODEL = "drill"
PACED = NAME  # the model of paced replicas
LARGE = 1 << 19  # tokens of context, and so of KV cache: room for hundreds of long streams
# Settings of a gateway that takes nobody for late, silent or hung, however slow the machine is. Slow start draws lots
# among replicas that joined at different times.
PATIENT: dict[str, Any] = {
    "max_wait_s": {"interactive": 600, "standard": 600},
    "health": {
        "hung_after_s": 600,
        "silent_after_s": 60,
        "probe_timeout_s": 60,
        "deep_probe_every_s": 0,
        "slow_start": {"ramp_s": 0},
    },
}
# What a replica holds of a prompt weighs more than any speed: on a busy machine one may be measured to be so slow that
# another had better compute the prompt anew.
BY_PREFIX = PATIENT | {"routing": {"weights": {"prefix": 1000.0}}}
_PENSTOCK = "penstock.cli.main"
_START_S = 300.0  # for a process to say its port, however busy the machine is
_LOOK_MS = 200
_SHOWN = 8000  # characters of a log, those at its end
_SHAPE = {
    "model_type": "llama",
    "vocab_size": 600,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "eos_token_id": 2,
}
_TEMPLATE = "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}</s>{% endfor %}"


class Process:
    """One command that serves."""

    def __init__(self, words: list[str], log: Path, environment: dict[str, str]) -> None:
        self.log = log
        self.is_wanted = True  # False: its end is the drill's doing
        command = [sys.executable, "-m", *words]
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
                env=os.environ | forking() | environment,
            )
        self.port = self._read_port()
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def memory_bytes(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)

    @property
    def has_died(self) -> bool:
        """Whether it has ended by itself: nobody here has ended it."""
        return self.is_wanted and not self.is_running

    def last_words(self) -> str:
        """Returns how it ended, and the end of its log."""
        end = self.log.read_text(errors="replace")[-_SHOWN:]
        return f"process {self.pid} ended with status {self._process.poll()}; {self.log.name}:\n{end}"

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to it, to its workers and to its engine."""
        if number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
            self.is_wanted = False
        engines = started_by(self.pid, ENGINE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
        for engine in engines:
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.send_signal(number)

    @contextlib.contextmanager
    def engine_stopped(self) -> Iterator[None]:
        """A replica's engine stands still; its server goes on."""
        engine = engine_of(self.pid)
        engine.suspend()
        try:
            yield
        finally:
            engine.resume()

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.load(answer)

    def post(self, path: str) -> Any:
        json_type = {"content-type": "application/json"}
        asked = urllib.request.Request(self.url + path, method="POST", headers=json_type)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.load(answer)

    def known_work(self) -> list[int]:
        """The work that a gateway believes its replicas do."""
        names = ("in_flight", "running", "waiting", "prefill_tokens", "kv_active_tokens")
        return [one[name] for one in self.get("/admin/v1/replicas")["replicas"] for name in names]

    def num_open(self) -> int:
        """The number of requests that a replica works on."""
        return int(self.get("/v1/penstock/snapshot")["num_open"])

    def is_ready(self) -> bool:
        try:
            self.get("/ready")
        except OSError:
            return False
        return True

    def complaints(self) -> list[str]:
        """Returns what no log should have."""
        return re.findall(r".*(?:Traceback|Exception|Error:|never retrieved).*", self.log.read_text())

    def end(self) -> None:
        self.is_wanted = False
        self.signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read_port(self) -> int:
        """Raises RuntimeError where the process ends, or says no port for too long."""
        said = ""
        for piece in self._output_until(time.monotonic() + _START_S):
            said += piece
            if port := re.search(r"http://[^\s:]+:(\d+)\D", said):
                return int(port[1])
        self.is_wanted = False
        self._process.kill()
        self._process.wait()
        raise RuntimeError(f"it did not start: {self.last_words()}")

    def _output_until(self, deadline_s: float) -> Iterator[str]:
        """Pieces of what it prints. A child of its own may hold the pipe for longer than it lives."""
        assert self._process.stdout is not None
        descriptor, poller = self._process.stdout.fileno(), select.poll()
        poller.register(descriptor, select.POLLIN)
        while time.monotonic() < deadline_s:
            if poller.poll(_LOOK_MS):
                if not (data := os.read(descriptor, 1 << 16)):
                    return
                yield data.decode(errors="replace")
            elif not self.is_running:
                return


class Stand:
    def __init__(self, directory: Path, context: int, **shape: int) -> None:
        self.directory = directory
        self.store = f"sqlite:///{directory / 'penstock.db'}"
        self.processes: list[Process] = []
        self.model = write_model(directory / MODEL, context, **shape)

    def replica(self, *flags: str) -> Process:
        words = [
            _PENSTOCK,
            "engine",
            str(self.model),
            "--load",
            "dummy",
            "--dtype",
            "float32",
            "--threads",
            "1",
            "--port",
            "0",
        ]
        return self._start("replica", [*words, "--log-level", "warning", *flags])

    def paced_replica(self, **options: float) -> Process:
        return self._start("paced", ["tools.drills.paced_replica", json.dumps(options)])

    def gateway(self, *replicas: Process, model: str = MODEL, **settings: Any) -> Process:
        values = {"port": 0, "store": self.store, "models": {model: {"replicas": [r.url for r in replicas]}}}
        path = self.directory / f"gateway-{len(self.processes)}.yaml"
        path.write_text(json.dumps(values | settings))  # which is YAML too
        found = self._start("gateway", [_PENSTOCK, "gateway", "--config", str(path), "--log-level", "warning"])
        if replicas:
            eventually(found.is_ready)
        return found

    def tenant(self, name: str, *flags: str) -> str:
        """Its key."""
        self.command("tenants", "add", name, *flags)
        return self.command("keys", "create", name)

    def usage(self, tenant: str) -> dict[str, int]:
        return dict(json.loads(self.command("usage", tenant, "--by", "all", "--json"))["total"])

    def command(self, *words: str) -> str:
        command = [sys.executable, "-m", _PENSTOCK, *words, "--store", self.store]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def complaints(self) -> list[str]:
        return [line for process in self.processes for line in process.complaints()]

    def check_all_run(self) -> None:
        """Raises RuntimeError where a process has ended that nobody here has ended."""
        for process in self.processes:
            if process.has_died:
                raise RuntimeError(process.last_words())

    def close(self) -> None:
        for process in reversed(self.processes):
            process.end()

    def _start(self, kind: str, words: list[str]) -> Process:
        log = self.directory / f"{kind}-{len(self.processes)}.log"
        found = Process(words, log, {"PENSTOCK_STORE": self.store})
        self.processes.append(found)
        return found


def write_model(directory: Path, context: int, **shape: int) -> Path:
    """A small Llama without weights, for engines that make up their own (`--load dummy`): all make the same."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(_SHAPE | {"max_position_embeddings": context} | shape))
    (directory / "tokenizer.json").write_text(load(byte_level()).to_json())
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))
    return directory


@contextlib.contextmanager
def stand(directory: Path, *, context: int = LARGE, **shape: int) -> Iterator[Stand]:
    """`shape`: of the replicas' model, as config.json names it, where it is to be another."""
    found = Stand(directory, context, **shape)
    try:
        yield found
    finally:
        found.close()
