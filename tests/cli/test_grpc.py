"""The gRPC port as a user starts it: of a replica with the default model, of a gateway, of its workers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc
import yaml
from tools.drills.stand import PATIENT
from tritonclient.utils import InferenceServerException

from tests.certificates import new_ca
from tests.cli.real_gateway import real_gateway
from tests.cli.real_server import real_server
from tests.oip.triton import Stream, inputs, joined, texts
from tests.server.replica import NAME, Replica, serving
from tests.waiting import GIVE_UP_S, eventually

pytestmark = pytest.mark.slow

KIND = tritonclient.grpc
QUESTION = "The capital of France is"


def _port(banner: str) -> int:
    found = re.search(r"gRPC.* at 127\.0\.0\.1:(\d+)", banner)
    assert found is not None, banner
    return int(found[1])


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    with serving(step_s=0.01) as found:
        yield found


def test_default_model_answers_and_finishes_when_it_is_told_to_stop() -> None:
    with real_server("--grpc-port", "0") as server:
        with contextlib.closing(KIND.InferenceServerClient(f"127.0.0.1:{_port(server.banner)}")) as client:
            greedy = {"temperature": 0.0, "seed": 1}
            told = client.infer(server.model, inputs(KIND, QUESTION, 8), parameters=greedy)
            whole = server.openai.completions.create(model=server.model, prompt=QUESTION, max_tokens=8, temperature=0)
            assert texts(told) == [whole.choices[0].text]
            stream = Stream(client)
            stream.ask(QUESTION, 60, "a", model=server.model, parameters={"ignore_eos": True, **greedy})
            pieces = [stream.next()]
            server.process.send_signal(signal.SIGTERM)
            pieces += stream.until_final()["a"]
            assert joined(pieces).startswith(whole.choices[0].text)
            assert texts(pieces[-1], "finish_reason") == ["length"]
        assert server.process.wait(GIVE_UP_S) == 0


def test_gateway_has_it_with_its_own_certificate(replica: Replica, tmp_path: Path) -> None:
    ca = new_ca(tmp_path)
    own = ca.issue("gateway")
    files = {"tls_cert": str(own.cert), "tls_key": str(own.key), "max_body_bytes": 1 << 16}
    with real_gateway(tmp_path, replica, trusts=ca.context(), grpc_port=0, **files) as gateway:
        assert gateway.process.stdout is not None
        address = f"localhost:{_port(gateway.process.stdout.readline())}"
        client = KIND.InferenceServerClient(address, ssl=True, root_certificates=str(ca.cert))
        with contextlib.closing(client):
            assert client.is_model_ready(NAME)
            assert len(texts(client.infer(NAME, inputs(KIND, "the fox", 4)))[0]) > 0
            with pytest.raises(InferenceServerException, match="RESOURCE_EXHAUSTED"):
                client.infer(NAME, inputs(KIND, "x" * (1 << 20), 4))
            status, answer = gateway.ask("POST", f"/v2/models/{NAME}/generate", {"text_input": "x", "max_tokens": 3})
            assert (status, answer["model_name"]) == (200, NAME)


def _gateway(directory: Path, replica: Replica, grpc_port: int) -> subprocess.Popen[str]:
    """Of two workers."""
    config = directory / "gateway.yaml"
    models = {NAME: {"replicas": [f"http://{replica.host}:{replica.port}"]}}
    store = f"sqlite:///{directory / 'store.db'}"
    config.write_text(yaml.safe_dump({"port": 0, "grpc_port": grpc_port, "store": store, "models": models, **PATIENT}))
    return subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.main", "gateway", "--processes", "2", "--config", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PENSTOCK_HOME": str(directory)},
    )


def test_workers_share_the_port(replica: Replica, tmp_path: Path) -> None:
    with socket.socket() as held:  # nobody else is given the port, and the workers may share it
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        with _gateway(tmp_path, replica, port) as process:
            assert process.stdout is not None
            try:
                lines = [process.stdout.readline() for _ in range(3)]
                assert _port(lines[2]) == port
                for _ in range(4):
                    with contextlib.closing(KIND.InferenceServerClient(f"127.0.0.1:{port}")) as client:
                        eventually(lambda: client.is_model_ready(NAME))
                        assert len(texts(client.infer(NAME, inputs(KIND, "the fox", 4)))[0]) > 0
                process.send_signal(signal.SIGTERM)
                assert process.wait(GIVE_UP_S) == 0
            finally:
                process.kill()


def test_workers_need_a_number_for_their_port(replica: Replica, tmp_path: Path) -> None:
    with _gateway(tmp_path, replica, 0) as process:
        assert "several workers cannot pick one free port" in process.communicate(timeout=GIVE_UP_S)[1]
        assert process.returncode == 1
