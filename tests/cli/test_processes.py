"""`penstock gateway --processes N` as a user starts it: workers come and go, and no client notices."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from tools.drills.stand import PATIENT

from penstock.cli.gateway_worker import ask
from tests.children import children
from tests.cli.real_server import tiny_server
from tests.server.replica import Replica, serving
from tests.waiting import GIVE_UP_S, eventually

pytestmark = pytest.mark.slow

NUM_WORKERS = 2
BODY = {"model": "small", "prompt": "once upon a time", "max_tokens": 4, "ignore_eos": True}


class SupervisedGateway:
    """A gateway of two workers; its supervisor may be another one later."""

    def __init__(self, directory: Path, replica: Replica, **settings: Any) -> None:
        self.log = directory / "gateway.log"
        self.config = directory / "gateway.yaml"
        self.settings: dict[str, Any] = {
            "port": 0,
            "admin_port": 0,
            "store": f"sqlite:///{directory / 'tenants.db'}",
            "models": {"small": {"replicas": [f"http://{replica.host}:{replica.port}"]}},
            **PATIENT,
        } | settings
        self.configure()
        self._home = directory
        self.start()

    def configure(self, **changed: Any) -> None:
        self.config.write_text(yaml.safe_dump(self.settings | changed))

    def start(self) -> None:
        with self.log.open("a") as log:
            process = self._run(subprocess.Popen, "--processes", str(NUM_WORKERS), stdout=subprocess.PIPE, stderr=log)
        self.process: subprocess.Popen[str] = process
        found = [re.search(r"http://([\d.:]+)", process.stdout.readline()) for _ in range(2)]
        assert all(found), self.log.read_text()
        self.address, self.admin_address = (one[1] for one in found if one)

    def _run(self, run: Any, *words: str, **options: Any) -> Any:
        command = [sys.executable, "-m", "penstock.cli.main", "gateway", *words, "--config", str(self.config)]
        return run(command, text=True, env=os.environ | {"PENSTOCK_HOME": str(self._home)}, **options)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        found: subprocess.CompletedProcess[str] = self._run(subprocess.run, *words, capture_output=True)
        return found

    def workers(self) -> dict[int, int]:
        """Process ids by slot, of those that accept."""
        found = {}
        for path in self._home.glob("run/*/*.sock"):
            slot, process_id, _ = path.name.split(".")
            with contextlib.suppress(OSError):
                if ask(path, "metrics").startswith(slot.encode() + b"\n"):
                    found[int(slot)] = int(process_id)
        return found

    def all_workers(self, *, but: Any = ()) -> dict[int, int]:
        """Once every slot has one that is not among these."""
        return eventually(self.workers, lambda found: len(found) == NUM_WORKERS and not set(found.values()) & set(but))

    def connect(self, address: str | None = None) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(address or self.address, timeout=GIVE_UP_S)

    def get(self, path: str, address: str | None = None) -> tuple[int, bytes]:
        with contextlib.closing(self.connect(address)) as connection:
            return exchange(connection, "GET", path)

    def close(self) -> None:
        """Whatever a test left behind."""
        self.process.kill()
        self.process.wait()
        for path in self._home.glob("run/*/*.sock"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.name.split(".")[1]), signal.SIGKILL)


def exchange(
    connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None = None
) -> tuple[int, bytes]:
    connection.request(method, path, json.dumps(body) if body else None)
    answer = connection.getresponse()
    return answer.status, answer.read()


class Load:
    """Clients that ask again and again until they are told to stop: each on a new connection, on one that is kept, or
    for a stream."""

    def __init__(self, gateway: SupervisedGateway) -> None:
        self.num_ok: Counter[str] = Counter()
        self.failures: list[object] = []
        self._gateway = gateway
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(kind,)) for kind in ("new", "kept", "stream")]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        self.some_more()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def some_more(self) -> None:
        """Waits until each client has had another answer."""
        before = dict(self.num_ok)
        eventually(lambda: dict(self.num_ok), lambda now: all(now.get(k, 0) > before.get(k, 0) for k in self._kinds))

    _kinds = ("new", "kept", "stream")

    def _run(self, kind: str) -> None:
        connection = self._gateway.connect()
        while not self._is_over.is_set():
            try:
                status, text = exchange(connection, "POST", "/v1/completions", BODY | {"stream": kind == "stream"})
            except (OSError, http.client.HTTPException) as error:
                self.failures.append((kind, error))
                connection.close()
                continue
            if status != 200 or (kind == "stream" and not text.endswith(b"data: [DONE]\n\n")):
                self.failures.append((kind, status, text))
            self.num_ok[kind] += 1
            if kind != "kept":
                connection.close()
        connection.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SupervisedGateway]:
    with serving(step_s=0.005) as replica:
        found = SupervisedGateway(tmp_path_factory.mktemp("processes"), replica)
        try:
            found.all_workers()
            yield found
        finally:
            found.close()


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SupervisedGateway]:
    with serving(step_s=0.005) as replica:
        found = SupervisedGateway(tmp_path_factory.mktemp("impatient"), replica, worker_timeout_s=5)
        try:
            yield found
        finally:
            found.close()


@pytest.fixture
def gateway(shared: SupervisedGateway) -> SupervisedGateway:
    """It runs, whatever the test before has done with it."""
    if shared.process.poll() is not None:
        shared.start()
    return shared


def test_every_worker_answers_and_one_that_hangs_keeps_nobody_waiting(gateway: SupervisedGateway) -> None:
    for process_id in gateway.all_workers().values():
        os.kill(process_id, signal.SIGSTOP)
        try:
            assert [gateway.get("/v1/models")[0] for _ in range(5)] == [200] * 5
        finally:
            os.kill(process_id, signal.SIGCONT)


def test_scrape_of_the_admin_port_finds_the_series_of_every_worker(gateway: SupervisedGateway) -> None:
    gateway.all_workers()

    def scrape() -> tuple[int, list[bytes], int]:
        """The status, the workers that have a series, and how often it is said what the series is."""
        status, text = gateway.get("/metrics", gateway.admin_address)
        series = re.findall(rb'^penstock_gateway_requests_open{worker="(\d)",model="small"} ', text, re.M)
        return status, series, text.count(b"# TYPE penstock_gateway_requests_open ")

    # A worker that does not answer its sibling within two seconds is left out.
    eventually(scrape, lambda found: found == (200, [b"0", b"1"], 1))


def test_killed_worker_is_started_again_and_meanwhile_nobody_is_refused(gateway: SupervisedGateway) -> None:
    killed = gateway.all_workers()[1]
    os.kill(killed, signal.SIGKILL)
    seen = eventually(
        lambda: (gateway.get("/v1/models")[0], gateway.workers().get(1)), lambda seen: seen[1] not in (None, killed)
    )
    assert seen[0] == 200
    assert "it was ended by SIGKILL" in gateway.log.read_text()


def stop(_: SupervisedGateway, process_id: int) -> None:
    os.kill(process_id, signal.SIGSTOP)


def block(gateway: SupervisedGateway, process_id: int) -> None:
    """The worker is told to read its configuration, which for it is a pipe that says nothing."""
    pipe = gateway.config.with_suffix(".pipe")
    os.mkfifo(pipe)
    pipe.replace(gateway.config)
    os.kill(process_id, signal.SIGHUP)
    opened: list[int] = []

    def is_read() -> bool:
        with contextlib.suppress(OSError):  # nobody reads it yet
            opened.append(os.open(gateway.config, os.O_WRONLY | os.O_NONBLOCK))
        return bool(opened)

    eventually(is_read)
    gateway.config.unlink()
    gateway.configure()


@pytest.mark.parametrize(("hang", "is_told"), [(stop, ""), (block, "in read_config_file\n")])
def test_worker_that_hangs_is_killed_and_started_again_and_the_other_serves_on(
    impatient: SupervisedGateway, hang: Callable[[SupervisedGateway, int], None], is_told: str
) -> None:
    workers = impatient.all_workers()
    hang(impatient, workers[1])
    seen = eventually(
        lambda: (impatient.get("/v1/models")[0], impatient.workers().get(1)),
        lambda seen: seen[1] not in (None, workers[1]),
    )
    assert seen[0] == 200
    log = impatient.log.read_text()
    assert f"worker 1 hangs: process {workers[1]} has sent no heartbeat for 5 s, and is killed" in log
    assert is_told in log  # where it hangs, unless it could not say
    assert not psutil.pid_exists(workers[1])


def test_rolling_restart_fails_no_request(gateway: SupervisedGateway) -> None:
    before = gateway.all_workers()
    with Load(gateway) as load:
        assert f"process {gateway.process.pid} " in gateway.command("restart").stdout
        gateway.all_workers(but=before.values())
        load.some_more()
    assert load.failures == []


def test_rolling_restart_with_a_bad_configuration_changes_nothing(gateway: SupervisedGateway) -> None:
    before = gateway.all_workers()
    gateway.configure(models={"small": {"replicas": ["http://127.0.0.1:9"], "dialect": "klingon"}})
    try:
        gateway.process.send_signal(signal.SIGUSR2)
        eventually(gateway.log.read_text, lambda log: "'klingon' is no dialect" in log)
    finally:
        gateway.configure()
    eventually(gateway.workers, lambda now: now == before)


def test_killed_supervisor_is_missed_by_nobody_and_another_takes_over(gateway: SupervisedGateway) -> None:
    before = gateway.all_workers()
    with Load(gateway) as load:
        gateway.process.kill()
        gateway.process.wait()
        load.some_more()
        addresses = gateway.address, gateway.admin_address
        gateway.start()
        assert (gateway.address, gateway.admin_address) == addresses
        gateway.all_workers(but=before.values())
        load.some_more()
    assert load.failures == []
    assert "runs already" in gateway.command("--processes", "2").stderr


def test_workers_that_are_told_to_end_finish_their_streams(gateway: SupervisedGateway) -> None:
    gateway.all_workers()
    body = BODY | {"stream": True, "max_tokens": 200}
    with contextlib.closing(gateway.connect()) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
        assert answer.readline()
        gateway.process.send_signal(signal.SIGTERM)
        assert answer.read().endswith(b"data: [DONE]\n\n")
    assert gateway.process.wait(GIVE_UP_S) == 0
    assert gateway.workers() == {}
    with pytest.raises(ConnectionRefusedError):
        gateway.get("/v1/models")


def test_first_worker_that_cannot_start_ends_the_command_with_its_words(tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text("port: 0\nmodels:\n  m: {replicas: [http://127.0.0.1:9], dialect: klingon}\n")
    command = [sys.executable, "-m", "penstock.cli.main", "gateway", "--processes", "2", "--config", str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PENSTOCK_HOME": str(tmp_path)})
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"penstock: {config}:3: 'klingon' is no dialect: ")


def test_replicas_of_serve_outlive_the_workers_in_front_of_them(tiny_model: Path) -> None:
    with tiny_server(tiny_model, "--replicas", "2", "--processes", "2") as server:
        assert "penstock gateway at" in server.banner
        assert "2 behind a gateway" in server.banner

        def running(command: str) -> set[psutil.Process]:
            return set(children(server.process.pid, command))

        replicas, workers = running("engine"), eventually(lambda: running("gateway"), lambda all: len(all) == 2)
        killed = workers.pop()
        killed.kill()
        eventually(lambda: running("gateway"), lambda now: len(now) == 2 and killed not in now)
        completion = server.openai.completions.create(model=server.model, prompt="once", max_tokens=2)
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 2
        assert running("engine") == replicas
    assert server.process.returncode == 0
    assert not any(one.is_running() for one in replicas | workers)


def test_a_reload_reaches_every_worker(gateway: SupervisedGateway) -> None:
    gateway.all_workers()
    small = gateway.settings["models"]["small"]
    gateway.configure(models={"small": small, "more": small | {"served_as": "small"}})
    try:
        assert "changed: models" in gateway.command("reload", "--url", f"http://{gateway.admin_address}").stdout
        ready = re.compile(rb'replica_state{worker="(.)",model="more".*state="ready"} 1')
        eventually(
            lambda: set(ready.findall(gateway.get("/metrics", gateway.admin_address)[1])),
            lambda workers: workers == {b"0", b"1"},
        )
    finally:
        gateway.configure()
        gateway.command("reload", "--url", f"http://{gateway.admin_address}")
