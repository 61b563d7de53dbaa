from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.bench.machine import busy_s, cpu_name, listening_pid, num_cores, tree_usage

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads Linux's /proc")


def test_a_listening_socket_leads_to_its_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert listening_pid(port) == os.getpid()
    assert listening_pid(port) is None


def test_a_tree_includes_its_descendants() -> None:
    alone = tree_usage(os.getpid())
    hold = "x = b'1' * (64 << 20); print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert tree_usage(os.getpid()).rss_bytes > alone.rss_bytes + (60 << 20)
        child.communicate("\n")


def test_a_process_that_has_ended_uses_nothing() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert tree_usage(child.pid).rss_bytes == 0


def test_the_machine_has_a_name_cores_and_a_past() -> None:
    assert cpu_name()
    assert num_cores() >= 1
    assert (busy_s() or 0) > 0
